"""Steps that are tried before training: all kinds of them for a plan that holds, a few for one that does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.trial_steps import _take_steps


@pytest.mark.parametrize(("above_after", "steps"), [(100, 7), (5, 5), (3, 3), (1, 3)])
def test_no_more_steps_than_are_needed_to_see_that_they_do_not_hold(above_after: int, steps: int) -> None:
    taken: list[torch.Tensor] = []
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    outcore.within(model, (x,), memory=None, plan={"1#0:out": "recompute"}, optimizer=1.0, quiet=True)
    managed = model.__dict__["forward"]
    assert isinstance(managed, ManagedForward)

    def loss(output: torch.Tensor) -> torch.Tensor:
        taken.append(output.detach())
        return output.square().sum()

    _take_steps(managed, (x,), {}, loss, list(model.parameters()), lambda: len(taken) >= above_after)
    assert len(taken) == steps
    assert all(torch.equal(output, taken[0]) for output in taken)
    assert all(p.grad is None for p in model.parameters())
