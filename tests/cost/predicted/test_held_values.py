"""What the user's Python holds is in the predicted peak, and in no plan's way."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import PlanError
from tests.cost.holding_programs import program
from tests.cost.oracle import Counter

SGD = partial(torch.optim.SGD, lr=1e-3)


def counted(model: nn.Module, x: Tensor) -> int:
    """Peak live bytes of the third training step, with what attributes hold from the step before."""
    optimizer = SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        held = [t for t in vars(model).values() if isinstance(t, Tensor)]
        with Counter([*model.parameters(), *model.buffers(), x, *held]) as counter:
            del held
            model(x).backward()
            optimizer.step()
    return counter.peak


def compare(seed: int) -> None:
    model, x, source = program(seed)
    graph = outcore.capture(model, (x,))
    predicted = memory_curve(graph, account(graph), optimizer=SGD).peak_bytes
    assert predicted == counted(model, x), source


def stay_below(seed: int, share: float) -> bool:
    """Whether there is a plan; if so, its peak is not above the budget."""
    model, x, source = program(seed)
    graph = outcore.capture(model, (x,))
    costs = by_bytes(account(graph), 1e9)
    budget = int(share * memory_curve(graph, costs, optimizer=SGD).peak_bytes)
    try:
        outcore.within(model, (x,), memory=budget, optimizer=0.0, costs=costs, stream=False, quiet=True)
    except PlanError:
        return False
    assert counted(model, x) <= budget, source
    return bool(outcore.memory_plan(model).policy)


@pytest.mark.parametrize("seed", range(10))
def test_the_predicted_peak_of_a_program_that_holds_values_is_the_counted_one(seed: int) -> None:
    compare(seed)


@pytest.mark.slow
def test_the_predicted_peak_of_many_programs_that_hold_values_is_the_counted_one() -> None:
    for seed in range(1000, 1300):
        compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_many_programs_that_hold_values_stay_below_the_budget(share: float) -> None:
    assert sum(stay_below(seed, share) for seed in range(2000, 2060)) > 10
