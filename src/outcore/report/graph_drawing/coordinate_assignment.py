"""From columns to x: each as near as possible to what it is wired to, none too near to another.

Every column wants to be at the mean of its neighbours; positions are then the nearest ones (least squares,
weighted by the boxes in a column) that keep the distances, found by merging columns that push each other into
blocks, as T. Dwyer, K. Marriott, P. Stuckey: *Fast node overlap removal* (2005) do. A few rounds of this
converge. Lanes have almost no weight and boxes are not pulled by skips, so lanes gather beside the
main line and do not bend it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Pull", "nearest", "settle"]

Pull = tuple[float, int, float]
"""A column is drawn, with a weight, to another one, plus an offset."""

ROUNDS = 30
STILL = 0.25
"""Pixels; the rounds end when no column moves further."""


def settle(weight: Sequence[float], apart: Sequence[dict[int, float]], pulls: Sequence[Sequence[Pull]]) -> list[float]:
    """The x of every column; see `nearest` for `weight` and `apart`."""
    x = nearest([0.0] * len(weight), weight, apart)
    for _ in range(ROUNDS):
        want = list(x)
        for i, drawn in enumerate(pulls):
            if drawn:
                mean = sum(w * (x[other] + offset) for w, other, offset in drawn) / sum(w for w, _, _ in drawn)
                want[i] = (x[i] + mean) / 2  # half way, or two that want to meet change places for ever
        before, x = x, nearest(want, weight, apart)
        if all(abs(a - b) < STILL for a, b in zip(before, x, strict=True)):
            break
    return x


def nearest(want: Sequence[float], weight: Sequence[float], apart: Sequence[dict[int, float]]) -> list[float]:
    """The positions nearest to `want` that keep the distances.

    Args:
        want: one position per column; columns are numbered such that each comes after those left of it.
        weight: of each column in the least squares.
        apart: for each column those left of it, with their distances.
    """
    size = len(want)
    block, offset = list(range(size)), [0.0] * size
    members, at, mass = [[i] for i in range(size)], list(want), list(weight)
    # Distances between blocks; those within one are kept for good and are forgotten.
    between = [[(i, other, space) for other, space in spaces.items()] for i, spaces in enumerate(apart)]
    for column in range(size):
        while True:
            own = block[column]
            between[own] = [row for row in between[own] if block[row[1]] != own]
            worst, left, shift = 1e-9, own, 0.0
            for member, other, space in between[own]:
                overlap = at[block[other]] + offset[other] + space - at[own] - offset[member]
                if overlap > worst:
                    worst, left, shift = overlap, block[other], offset[other] + space - offset[member]
            if left == own:
                break
            total = mass[left] + mass[own]
            at[left] = (at[left] * mass[left] + (at[own] - shift) * mass[own]) / total
            mass[left] = total
            for member in members[own]:
                block[member] = left
                offset[member] += shift
            members[left] += members[own]
            between[left] += between[own]
            members[own], between[own] = [], []
    x = [at[block[i]] + offset[i] for i in range(size)]
    for i, spaces in enumerate(apart):  # what rounding left over
        for other, space in spaces.items():
            x[i] = max(x[i], x[other] + space)
    return x
