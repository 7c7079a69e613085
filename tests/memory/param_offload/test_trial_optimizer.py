"""A trial of a step takes the memory of a step, and leaves model and optimizer as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.memory.param_offload.buckets import calls_of, uses_of
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.param_offload.trial_optimizer import TrialOptimizer, like
from outcore.planner.memory.state_policy import StatePolicy, ladder
from tests.memory.param_offload.test_offloader import ADAM, SGD
from tests.planner.memory.test_state_residency import slow_copies

__all__ = ["slow_copies"]

WINDOW = StatePolicy("offload", "offload", "offload", stage_bytes=60_000, flat_buffer_bytes=20_000)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))


def step(model: nn.Module, batch: torch.Tensor, keeper: StateOffloader, update: Callable[[], object]) -> int:
    """The most that a step holds beside what there was."""
    with LiveBytes([*model.parameters(), batch]) as live:
        keeper.around(model, batch).square().mean().backward()
        update()
    for p in model.parameters():
        p.grad = None
    return live.peak


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("policy", [StatePolicy(optimizer="offload", flat_buffer_bytes=20_000), WINDOW])
@pytest.mark.parametrize("make", [SGD, ADAM])
def test_a_trial_takes_what_a_step_takes_and_changes_nothing(
    policy: StatePolicy, make: Callable[..., torch.optim.Optimizer]
) -> None:
    model, batch = network(), torch.randn(8, 64)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = make(list(model.parameters()))
    cost, uses = OptimizerCost.of(optimizer), uses_of(model, calls_of(outcore.capture(model, (batch,))))
    device = torch.device("cpu")
    tried = StateOffloader(optimizer, uses, policy, device, partial=functools.partial(TrialOptimizer, cost=cost))
    trial = [step(model, batch, tried, tried.step) for _ in range(3)]
    tried.close()
    assert not optimizer.state and "step" not in optimizer.__dict__
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    real = StateOffloader(optimizer, uses_of(model, calls_of(outcore.capture(model, (batch,)))), policy, device)
    taken = [step(model, batch, real, optimizer.step) for _ in range(3)]
    real.close()
    for a, b in zip(trial[1:], taken[1:], strict=True):  # what the first makes below the device is counted here too
        assert abs(a - b) <= 0.02 * b, (trial, taken)


def test_state_that_is_there_is_tried_as_it_is() -> None:
    model, batch = network(), torch.randn(8, 64)
    optimizer = ADAM(list(model.parameters()))
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [t.clone() for s in optimizer.state.values() for t in s.values()]
    uses = uses_of(model, calls_of(outcore.capture(model, (batch,))))
    partial = functools.partial(TrialOptimizer, cost=OptimizerCost.of(optimizer))
    keeper = StateOffloader(optimizer, uses, ladder({"all": 100_000})[1], torch.device("cpu"), partial=partial)
    step(model, batch, keeper, keeper.step)
    keeper.close()
    assert isinstance(keeper.stepper, TrialOptimizer) and not keeper.stepper.made
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_parts_of_a_tensor_are_taken_too() -> None:
    assert [t.numel() for t in like(torch.empty(10), 2.5)] == [10, 10, 5]
    assert like(torch.empty(10), 0.0) == []
