"""Intervals that stay honest for a few slides, all of them right.

Drawing examples again (Efron 1979) says nothing where a network makes no mistake: every draw of two slides that were
told apart has an area of 1, and "1.00 (1.00 to 1.00)" would be read as certainty. Score intervals ask instead which
true values would make what was seen unlikely, and do not collapse at 0 and 1:

* a share of n: Wilson (1927);
* the area under a ROC of m and n examples: Newcombe (2006), method 5, with the variance of Hanley and McNeil (1982);
* an average precision: the binomial interval of Boyd, Eng and Page (2013) over the positive examples, in the same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["area_interval", "wilson"]

_Z = 1.959963984540054
"""95 % of a normal distribution lie within so many deviations."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """The interval of a share that was seen among so many.

    >>> [round(end, 3) for end in wilson(1.0, 10)]
    [0.722, 1.0]
    """
    if count <= 0 or math.isnan(share):
        return 0.0, 1.0
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def area_interval(area: float, positives: int, negatives: int) -> tuple[float, float]:
    """The interval of an area under a ROC.

    >>> [round(end, 2) for end in area_interval(1.0, 1, 1)]
    [0.21, 1.0]
    """
    if min(positives, negatives) < 1 or math.isnan(area):
        return 0.0, 1.0
    more = (positives + negatives) / 2 - 1

    def unlikely(true: float) -> float:
        spread = 1 + more * (1 - true) / (2 - true) + more * true / (1 + true)
        return (area - true) ** 2 - _Z**2 * true * (1 - true) * spread / (positives * negatives)

    return _root(unlikely, 0.0, area), _root(unlikely, 1.0, area)


def _root(value: Callable[[float], float], outside: float, inside: float) -> float:
    """Where a function changes its sign between a place where it is positive and one where it is not."""
    if value(outside) <= 0:
        return outside
    for _ in range(60):
        middle = (outside + inside) / 2
        outside, inside = (middle, inside) if value(middle) > 0 else (outside, middle)
    return inside
