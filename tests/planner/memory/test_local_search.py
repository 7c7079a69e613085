"""Stirring an assignment: never slower, never above the budget, and as good as brute force where that can be had."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from outcore.planner.memory.evaluate import StepModel, StepUnderPolicies
from outcore.planner.memory.local_search import drifted, perturbed, squeezed
from outcore.planner.memory.search import PolicySearch, fit, smallest
from outcore.program.policies import KEEP, Policies
from tests.planner.memory.test_plan import brute_force, step


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_from_everything_made_again_stirring_finds_the_best_there_is(share: float) -> None:
    keeping = step(3)
    least = smallest(keeping).outcome.peak_bytes
    budget = int(least + share * (keeping.plain.peak_bytes - least))
    search = PolicySearch(keeping, budget, 20.0)
    first = search.give_up(search.assign({n: c[0] for n, c in search.choices.items()}))
    assert first.fits(budget)
    found = perturbed(search, first)
    assert found.fits(budget)
    assert found.outcome.time_s <= first.outcome.time_s
    assert found.outcome.time_s <= 1.001 * brute_force(keeping, budget)


def test_squeezing_ends_near_the_smallest_peak_of_all_assignments() -> None:
    keeping = step(3)
    search = PolicySearch(keeping, 0, 20.0)
    found = squeezed(search, search.assign(search.start))
    assert found.outcome.peak_bytes < search.assign(search.start).outcome.peak_bytes
    assert found.outcome.peak_bytes <= 1.03 * min(outcome.peak_bytes for outcome in every_assignment(keeping))


def test_an_assignment_of_another_network_leaves_nothing_behind() -> None:
    """A network that took another way is planned from the plan before, which may keep what this one does not have."""
    keeping = step(3)
    budget = int(0.9 * keeping.plain.peak_bytes)
    found = fit(keeping, budget, near={"elsewhere#0:out": KEEP, next(iter(keeping.buffers)): KEEP})
    assert found.fits(budget)
    assert set(found.policy) <= set(keeping.buffers)


def every_assignment(keeping: StepModel) -> Iterator[StepUnderPolicies]:
    """Brute force."""
    choices = {b.name: [KEEP, *c] for b in keeping.buffers.values() if b.bytes > 1000 and (c := keeping.choices(b))}
    for picked in itertools.product(*choices.values()):
        yield keeping.evaluate(dict(zip(choices, picked, strict=True)))


def test_drifting_finds_the_smallest_peak_of_all_assignments() -> None:
    keeping = step(3)
    search = PolicySearch(keeping, 0, 20.0)
    start = search.assign(search.start)
    found = drifted(search, start)
    reachable = [o.peak_bytes for o in every_assignment(keeping) if o.time_s <= 1.3 * start.outcome.time_s]
    assert found.outcome.peak_bytes <= 1.03 * min(reachable) < start.outcome.peak_bytes


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_drifting_ends_within_a_budget_and_is_fast_there(share: float) -> None:
    keeping = step(3)
    least = smallest(keeping).outcome.peak_bytes
    budget = int(least + share * (keeping.plain.peak_bytes - least))
    search = PolicySearch(keeping, budget, 20.0)
    found = drifted(search, search.assign(search.start))
    assert found.fits(budget)
    assert found.outcome.time_s <= 1.001 * brute_force(keeping, budget)


def test_stirring_stops_when_the_time_is_up() -> None:
    keeping = step(3)
    search = PolicySearch(keeping, int(0.8 * keeping.plain.peak_bytes), 0.0)
    start = search.assign({n: c[0] for n, c in search.choices.items()})
    assert perturbed(search, start) is start
    assert drifted(search, start) is start


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_what_is_found_does_not_depend_on_a_busy_machine(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = step(3)
    budget = int(share * keeping.plain.peak_bytes)
    quick = fit(keeping, budget, time_limit_s=0.005)
    evaluate = StepModel.evaluate

    def slowly(self: StepModel, policy: Policies) -> StepUnderPolicies:
        time.sleep(2e-4)
        return evaluate(self, policy)

    monkeypatch.setattr(StepModel, "evaluate", slowly)
    slow = fit(step(3), budget, time_limit_s=0.005)
    assert slow.policy == quick.policy and slow.outcome.peak_bytes == quick.outcome.peak_bytes
