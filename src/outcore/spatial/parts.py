"""Which part of every value a rank owns.

The ranks form a grid over the pixel axes of the image. Along each axis a value is cut at the same relative places,
whatever its size there, so that a rank's parts of all values lie over the same piece of the image. Parts of one value
are disjoint and complete. They need not be equal, sizes need not divide, and a value that is shorter than the grid
leaves some ranks without a part.

    image, 11 px        |0 1 2 3|4 5 6|7 8 9 10|     three ranks, cut at 1/3 and 2/3
    after a pool, 5 px  |0 1|2|3 4|
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from outcore.errors import PlanError
from outcore.ops.region import Interval, Region
from outcore.stream.network import RegionNetwork

__all__ = ["PartGrid", "contains", "intersection"]


@dataclass(frozen=True)
class PartGrid:
    """Ranks along each pixel axis, and where the axes are cut.

    >>> PartGrid((2, 2)).position(3), PartGrid((1, 3)).interval(1, 2, 11)
    ((1, 1), (7, 11))
    """

    counts: tuple[int, ...]
    cuts: tuple[tuple[float, ...], ...] = ()
    """Per axis, the relative places of the cuts between parts; empty for equal parts."""

    def __post_init__(self) -> None:
        if not self.counts or any(not isinstance(n, int) or n < 1 for n in self.counts):
            raise PlanError(f"grid {self.counts} must have at least 1 rank along each axis, such as (2, 2)")
        if not self.cuts:
            return
        if len(self.cuts) != len(self.counts):
            raise PlanError(f"cuts are given for {len(self.cuts)} axes of {len(self.counts)}")
        for count, cuts in zip(self.counts, self.cuts, strict=True):
            inside = all(0 < a < b < 1 for a, b in itertools.pairwise((*cuts, 1 - 1e-9))) and len(cuts) == count - 1
            if not inside:
                raise PlanError(f"{count} parts need {count - 1} ascending cuts between 0 and 1, not {list(cuts)}")

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __str__(self) -> str:
        return " x ".join(str(n) for n in self.counts)

    def position(self, rank: int) -> tuple[int, ...]:
        """Where in the grid a rank is, row by row."""
        found = []
        for count in reversed(self.counts):
            rank, at = divmod(rank, count)
            found.append(at)
        return tuple(reversed(found))

    def edge(self, axis: int, k: int, size: int) -> int:
        """Where part k begins on something of this size."""
        count = self.counts[axis]
        if k in (0, count) or not self.cuts:
            return (2 * k * size + count) // (2 * count)
        return math.floor(self.cuts[axis][k - 1] * size + 0.5)

    def interval(self, axis: int, k: int, size: int) -> Interval:
        """Part k of something of this size; may be empty."""
        return self.edge(axis, k, size), self.edge(axis, k + 1, size)

    def own(self, network: RegionNetwork, value: str, rank: int) -> Region | None:
        """The part of a value that a rank owns; None where it owns nothing of it."""
        at, found = self.position(rank), []
        for n, axis in zip(network.shapes[value], network.axes[value], strict=True):
            found.append((0, n) if axis is None else self.interval(axis, at[axis], n))
        lacking = set(range(len(self.counts))) - set(network.axes[value])
        empty = any(lo >= hi for lo, hi in found)
        return None if empty or any(at[axis] for axis in lacking) else tuple(found)

    def owners(self, network: RegionNetwork, value: str) -> list[Region | None]:
        """The parts of a value by rank."""
        return [self.own(network, value, rank) for rank in range(len(self))]


def intersection(a: Region | None, b: Region | None) -> Region | None:
    """What two regions have in common; None if nothing."""
    if a is None or b is None:
        return None
    found = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in found) else found


def contains(held: Region | None, wanted: Region | None) -> bool:
    """Whether all that is wanted is held."""
    if wanted is None:
        return True
    return held is not None and all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(held, wanted, strict=True))


def shape_of(counts: Sequence[int], axes: int) -> tuple[int, ...]:
    """A grid's counts for so many pixel axes; missing ones come first and are not cut."""
    if len(counts) > axes:
        raise PlanError(f"a grid of {len(counts)} axes does not fit an image of {axes}; give {axes} numbers")
    return (*(1,) * (axes - len(counts)), *counts)
