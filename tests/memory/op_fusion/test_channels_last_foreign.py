"""Foreign networks with channels last inside and everything fused with its ReLU, beside plain training in float64."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import CaptureError
from outcore.graph import capture
from outcore.graph.memory_format import ChannelsLast, channels_last, drawn, recorded
from outcore.graph.structure import substitute
from outcore.memory.op_fusion import add_relu, conv_bias_relu
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.memory_format import MemoryFormat
from tests.foreign.foreign import Foreign
from tests.foreign.sample import quarter
from tests.foreign.zoo import QUICK
from tests.memory.oracle import total

BOUND = 1e-9
"""Of the largest gradient."""
Numbers = list[torch.Tensor | None]


def numbers(model: nn.Module, args: Any, kwargs: Any) -> Numbers:
    """Gradients and buffers of a step."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    total(model(*args, **kwargs)).backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize("foreign", quarter(QUICK), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_trains_as_plain_does(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = foreign.build().double().train()
    args, kwargs = substitute(foreign.inputs(2), torch.Tensor, lambda t: t.double() if t.is_floating_point() else t)
    try:
        graph = capture(model, args, kwargs)
    except CaptureError as error:
        pytest.skip(str(error))
    order = channels_last(graph)
    if not isinstance(order, ChannelsLast):
        pytest.skip(order or "no images")
    try:
        turned = recorded(model, args, kwargs, order)
    except CaptureError as error:
        pytest.skip(f"cannot be turned: {error}")
    if (call := drawn(graph, turned)) is not None:
        pytest.skip(f"{call} may draw others")
    for module in (conv_bias_relu, add_relu):
        monkeypatch.setattr(module, "_DEVICES", {"cpu"})
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    settings = Settings(None, OptimizerCost.of(0.0, "cpu"), policy={}, reassociated=True, order=MemoryFormat(order))
    managed_forward = ManagedForward(model, settings)
    key = managed_forward.key(args, kwargs)
    managed_forward.admit(key, args, kwargs)
    if managed_forward.admitted[key] is None:
        pytest.skip("runs as it is")
    model.__dict__["forward"] = managed_forward
    ours, theirs = numbers(model, args, kwargs), numbers(plain, args, kwargs)
    assert len(managed_forward.admitted) == 1
    scale = max((p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None), default=0.0)
    far = apart(ours, theirs)
    if far > BOUND * scale:  # as norms over two numbers do, plain training itself makes much of how it rounds
        by_hand = foreign.build().double().train()
        by_hand.load_state_dict(before)
        turned_args = substitute((args, kwargs), torch.Tensor, order._turned)
        assert far <= 10 * apart(numbers(by_hand, *turned_args), theirs)


def apart(ours: Numbers, theirs: Numbers) -> float:
    """The largest difference."""
    assert [a is None for a in ours] == [b is None for b in theirs]
    pairs = zip(ours, theirs, strict=True)
    return max(
        float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None and b.is_floating_point()
    )
