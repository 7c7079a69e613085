"""Intervals of few slides: wide also where nothing is wrong, and true as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outcore.report.intervals import _Z, area_interval, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_shares_are_those_that_newcombe_printed(right: int, count: int, low: float, high: float) -> None:
    """Newcombe (1998), table I, method 3."""
    assert wilson(right / count, count) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("examples", [(1, 1), (3, 5), (40, 60)])
@pytest.mark.parametrize("area", [0.0, 0.3, 0.8, 1.0])
def test_ends_of_an_area_are_as_far_as_chance_goes(area: float, examples: tuple[int, int]) -> None:
    m, n = examples
    more = (m + n) / 2 - 1
    low, high = area_interval(area, m, n)
    assert 0 <= low <= area <= high <= 1 and (low < area or area == 0) and (high > area or area == 1)
    for end in {low, high} - {area, 0.0, 1.0}:
        spread = end * (1 - end) * (1 + more * (1 - end) / (2 - end) + more * end / (1 + end)) / (m * n)
        assert abs(area - end) == pytest.approx(_Z * math.sqrt(spread), rel=1e-6)


def test_nothing_is_certain_of_two_slides_and_nothing_is_known_of_none() -> None:
    assert area_interval(1.0, 1, 1)[0] < 0.25 and wilson(1.0, 2)[0] < 0.35
    assert area_interval(float("nan"), 3, 0) == wilson(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize("distance", [0.5, 1.5, 3.0])
def test_the_true_area_is_inside_as_often_as_said(distance: float) -> None:
    """Two normal distributions so far apart: the area is known."""
    true = 0.5 * (1 + math.erf(distance / 2))
    draw = np.random.default_rng(5)
    inside = 0
    for _ in range(1000):
        good, bad = draw.normal(distance, 1, 6), draw.normal(0, 1, 9)
        low, high = area_interval(float((good[:, None] > bad).mean()), 6, 9)
        inside += low <= true <= high
    assert inside >= 930
