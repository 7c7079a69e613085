"""Stirring an assignment: never slower, never above the budget, and as good as brute force where that can be had."""

from __future__ import annotations

import itertools

import pytest

from outcore.planner.budget import Search, smallest
from outcore.planner.stirring import squeezed, stirred

from .test_frontier import brute_force, step


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_from_everything_made_again_stirring_finds_the_best_there_is(share: float) -> None:
    keeping = step(3)
    least = smallest(keeping).outcome.peak_bytes
    budget = int(least + share * (keeping.plain.peak_bytes - least))
    search = Search(keeping, budget, 20.0)
    first = search.give_up(search.assign({n: c[0] for n, c in search.choices.items()}))
    assert first.fits(budget)
    found = stirred(search, first)
    assert found.fits(budget)
    assert found.outcome.time_s <= first.outcome.time_s
    assert found.outcome.time_s <= 1.001 * brute_force(keeping, budget)


def test_squeezing_ends_near_the_smallest_peak_of_all_assignments() -> None:
    keeping = step(3)
    search = Search(keeping, 0, 20.0)
    found = squeezed(search, search.assign(search.start))
    assert found.outcome.peak_bytes < search.assign(search.start).outcome.peak_bytes
    choices = {b.name: ["keep", *c] for b in keeping.buffers.values() if b.bytes > 1000 and (c := keeping.choices(b))}
    every = (dict(zip(choices, picked, strict=True)) for picked in itertools.product(*choices.values()))
    assert found.outcome.peak_bytes <= 1.03 * min(keeping.evaluate(policy).peak_bytes for policy in every)


def test_stirring_stops_when_the_time_is_up() -> None:
    keeping = step(3)
    search = Search(keeping, int(0.8 * keeping.plain.peak_bytes), 0.0)
    start = search.assign({n: c[0] for n, c in search.choices.items()})
    assert stirred(search, start) is start
