"""Foreign models whose state passes through a window: the weights of plain training."""

import copy
from typing import Any

import pytest
import torch

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.state_policy import ladder
from tests.foreign.sample import quarter
from tests.foreign.zoo import QUICK, by_name
from tests.memory.oracle import total
from tests.memory.param_offload.test_offloader import ADAM


@pytest.mark.foreign
@pytest.mark.parametrize("name", ["torchvision/shufflenet_v2_x0_5", "monai/UNet2d", "hf/gpt2"])
def test_foreign_models_through_a_window(name: str) -> None:
    _trains_as_plain(name)


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("name", quarter([foreign.name for foreign in QUICK]))
def test_more_foreign_models_through_a_window(name: str) -> None:
    _trains_as_plain(name)


def _trains_as_plain(name: str) -> None:
    foreign = by_name(name)
    torch.manual_seed(0)
    model = foreign.build().train()
    args, kwargs = foreign.inputs(2)
    plain = copy.deepcopy(model)
    costs = by_bytes(account(outcore.capture(model, args, kwargs)), 1e9)
    optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
    state = ladder(costs.parameters)[-1]
    outcore.within(model, args, kwargs, memory=None, costs=costs, optimizer=optimizer, state=state, quiet=True)
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(3)
        for _ in range(2):
            opt.zero_grad()
            total(_called(net, args, kwargs)).backward()
            opt.step()
    ours = model.state_dict()
    outcore.release(model)
    assert not [n for n, t in plain.state_dict().items() if not _same(ours[n], t)]


def _called(net: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return net(*args, **(kwargs or {}))


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
