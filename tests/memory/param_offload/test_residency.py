"""What a forward learns of parameters that are off the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.param_offload.buckets import Bucket
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.param_offload.residency import ParamResidency, _Answers
from outcore.planner.memory.state_policy import StatePolicy

WINDOW = StatePolicy("offload", "offload", "offload", stage_bytes=40_000, flat_buffer_bytes=17_000)


class Asking(nn.Module):
    """A network that looks where its first parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        self.found: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(next(self.parameters()).device.type)
        return self.layers(x)


@pytest.mark.parametrize("memory", [None, 2**40])
@pytest.mark.parametrize("training", [True, False])
def test_parameters_say_where_the_model_computes(
    memory: int | None, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are on the host until they are needed; a forward that takes its device from them (for autocast,
    for positions) would compute with other numbers. Here another device stands for the GPU."""
    model, batch = Asking(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outcore.within(model, (batch,), memory=memory, optimizer=optimizer, state=WINDOW, measure_s=0.05, quiet=True)
    elsewhere = torch.empty(0, device="meta")
    monkeypatch.setattr(ParamResidency, "_empty_on_device", elsewhere)
    monkeypatch.setattr(ParamResidency, "answering", lambda residency: _Answers(residency))
    model.found.clear()
    with torch.set_grad_enabled(training):
        found: Any = model(batch)
    assert model.found == ["meta"] and found.device.type == "cpu"
    outcore.release(model)
    model(batch)
    assert model.found == ["meta", "cpu"]


def test_what_is_called_to_fetch_parameters_is_not_taken_for_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are matched with the calls of a forward by their names and order, and fetching slices tensors too."""
    model, batch = nn.Sequential(*(nn.MultiheadAttention(32, 2) for _ in range(2))), torch.randn(8, 2, 32)
    hidden: list[bool] = []
    fetch = StateOffloader.fetch

    def fetched(offloader: StateOffloader, *buckets: Bucket, backward: bool = False) -> None:
        hidden.append(torch._C._is_torch_function_all_disabled() or backward)
        fetch(offloader, *buckets, backward=backward)

    model.forward = lambda x: model[1](*[model[0](x, x, x)[0]] * 3)[0]  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(StateOffloader, "fetch", fetched)
    outcore.within(model, (batch,), memory=2**40, optimizer=optimizer, state=WINDOW, measure_s=0.05, quiet=True)
    model(batch).sum().backward()
    optimizer.step()
    assert len(hidden) > 4 and all(hidden)


def test_nothing_is_answered_where_all_parameters_are_there() -> None:
    model, batch = Asking(), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outcore.within(model, (batch,), memory=None, optimizer=optimizer, state={"optimizer": "offload"}, quiet=True)
    keeper = model.__dict__["forward"].keeper
    assert not isinstance(keeper.answering(), _Answers)
    elsewhere = torch.randn(3)
    assert keeper.asked_where((elsewhere,)) == (elsewhere,)
