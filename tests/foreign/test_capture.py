"""Models nobody here wrote, captured and replayed bitwise equal: outputs, every gradient, every buffer, random state.

Each is captured once and replayed in the mode it was captured in, in the other mode, and at another batch size.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outcore
from tests.foreign.foreign import Foreign
from tests.foreign.sample import quarter, rotating
from tests.foreign.zoo import QUICK, ZOO
from tests.graph.replay import assert_same, run

pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("foreign", rotating(QUICK, 10), ids=str)
def test_captured_in_train_mode_and_replayed_with_another_batch(foreign: Foreign) -> None:
    check(foreign, captured_in="train", replayed=[("train", 3 if foreign.other_batch else 2)])


@pytest.mark.slow
@pytest.mark.parametrize(("foreign", "mode"), quarter((f, mode) for f in ZOO for mode in ("train", "eval")), ids=str)
def test_captured_in_one_mode_and_replayed_in_both(foreign: Foreign, mode: str) -> None:
    other = "eval" if mode == "train" else "train"
    check(foreign, captured_in=mode, replayed=[(mode, 2), (other, 2), (mode, 3)])


def check(foreign: Foreign, *, captured_in: str, replayed: list[tuple[str, int]]) -> None:
    model = seeded(foreign)
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args, kwargs = foreign.inputs(2)
    graph = outcore.capture(model.train(captured_in == "train"), args, kwargs)
    assert all(torch.equal(untouched[name], tensor) for name, tensor in model.state_dict().items())
    assert list(graph.module.state_dict()) == list(untouched)
    for mode, batch in replayed:
        if batch != 2 and not foreign.other_batch:
            continue
        model.train(mode == "train")
        args, kwargs = foreign.inputs(batch)
        plain = seeded(foreign).train(mode == "train")  # not a copy: hooks of some models hold on to the original
        before = copy.deepcopy(model.state_dict())
        assert_same(run(plain, args, kwargs, plain), run(graph.module, args, kwargs, model))
        model.load_state_dict(before)


def seeded(foreign: Foreign) -> nn.Module:
    torch.manual_seed(0)
    return foreign.build()
