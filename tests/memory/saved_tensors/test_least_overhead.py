"""What of a budget is left to the allocator, with allocators that are functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outcore.memory.saved_tensors.least_overhead import TriedOverhead, least_overhead

BUDGET = 1000_000


def tried(
    taken: Callable[[int], int], least: int | None = None
) -> tuple[list[int], Callable[[int], TriedOverhead | None]]:
    """An allocator that takes so much when so much is left free, and which plans there are."""
    asked: list[int] = []

    def attempt(free: int) -> TriedOverhead | None:
        asked.append(free)
        if least is not None and BUDGET - free < least:
            return None
        return TriedOverhead(free, taken(free), 1.0 + free / BUDGET)

    return asked, attempt


def test_what_fits_at_once_is_tried_once() -> None:
    asked, attempt = tried(lambda free: BUDGET - free)
    assert least_overhead(attempt, BUDGET).free_bytes == 0
    assert asked == [0]


@pytest.mark.parametrize("overhead", [0.01, 0.08, 0.3, 0.7])
def test_an_allocator_that_takes_a_share_more_gets_little_more_than_that(overhead: float) -> None:
    _, attempt = tried(lambda free: int((1 + overhead) * (BUDGET - free)))
    found = least_overhead(attempt, BUDGET)
    needed = BUDGET - BUDGET / (1 + overhead)
    assert found.taken_bytes <= BUDGET
    assert needed <= found.free_bytes <= needed + 0.05 * BUDGET


def test_holes_that_differ_from_plan_to_plan() -> None:
    for seed in range(50):

        def taken(free: int, seed: int = seed) -> int:
            return BUDGET - free + (hash((seed, free // 7)) % 9) * BUDGET // 50

        _, attempt = tried(taken)
        found = least_overhead(attempt, BUDGET)
        assert found.taken_bytes <= BUDGET and found.free_bytes <= 0.25 * BUDGET


def test_where_no_plan_is_small_enough_the_nearest_is_taken() -> None:
    _, attempt = tried(lambda free: int(1.5 * (BUDGET - free)), least=900_000)
    found = least_overhead(attempt, BUDGET)
    assert found.taken_bytes > BUDGET
    assert found.free_bytes >= 70_000  # near the smallest there is


def test_the_smallest_plan_is_found_where_only_it_holds() -> None:
    _, attempt = tried(lambda free: int(1.1 * (BUDGET - free)), least=890_000)
    found = least_overhead(attempt, BUDGET)
    assert found.taken_bytes <= BUDGET


def test_what_costs_no_time_is_not_made_finer() -> None:
    asked: list[int] = []

    def attempt(free: int) -> TriedOverhead:
        asked.append(free)
        return TriedOverhead(free, 2 * BUDGET if free < 10_000 else BUDGET // 2, 1.0)

    assert least_overhead(attempt, BUDGET).taken_bytes == BUDGET // 2
    assert len(asked) == 2


def test_without_time_something_that_holds_is_still_looked_for_and_then_left_as_it_is() -> None:
    """A machine that is busy, or a process that was stopped for a while, gets a plan that holds all the same."""
    asked, attempt = tried(lambda free: int(1.3 * (BUDGET - free)))
    found = least_overhead(attempt, BUDGET, late=lambda: True)
    assert found.taken_bytes <= BUDGET
    in_time, again = tried(lambda free: int(1.3 * (BUDGET - free)))
    assert least_overhead(again, BUDGET).free_bytes <= found.free_bytes and in_time[: len(asked)] == asked
    overshot = [free for free in asked if 1.3 * (BUDGET - free) <= BUDGET]
    assert overshot == asked[-1:]
