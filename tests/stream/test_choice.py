"""The choice among ways to stream."""

from __future__ import annotations

import pytest

from outcore.errors import PlanError
from outcore.planner.tiles import Candidate, choose

WAYS = [
    Candidate(boundary, (tile,), time_s=1 / tile + cost, rough_bytes=10 * tile + rest)
    for boundary, cost, rest in ((("early",), 0.0, 900), (("late",), 0.1, 100), (None, 0.2, 0))
    for tile in (1, 2, 4, 8, 16, 32)
]


def test_the_fastest_that_fits_is_taken() -> None:
    def exact(candidate: Candidate) -> int:
        return candidate.rough_bytes

    for budget in (20, 60, 150, 400, 1000, 5000):
        fitting = [c for c in WAYS if c.rough_bytes <= budget]
        assert choose(WAYS, budget, exact) == (
            best := min(fitting, key=lambda c: c.time_s),
            best.rough_bytes,
        )
    assert choose(WAYS, None, exact)[0] == min(WAYS, key=lambda c: c.time_s)


def test_rough_bytes_that_are_wrong_for_one_boundary_do_not_lead_astray() -> None:
    asked = []

    def exact(candidate: Candidate) -> int:
        asked.append(candidate)
        return candidate.rough_bytes * (5 if candidate.boundary == ("early",) else 2)

    chosen, size = choose(WAYS, 1000, exact)
    assert chosen == Candidate(("late",), (32,), 1 / 32 + 0.1, 420) and size == 840
    assert len(asked) <= 4


def test_none_that_fits_names_the_least() -> None:
    with pytest.raises(PlanError, match="the least found is 30 B"):
        choose(WAYS, 5, lambda c: 3 * c.rough_bytes)
    with pytest.raises(PlanError, match="no way to stream"):
        choose([], 5, lambda c: 0)
