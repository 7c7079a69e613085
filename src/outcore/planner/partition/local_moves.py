"""Improving a partition by moving single units to a neighbouring stage.

What a row cannot express (half of one branch here, the whole of the other there) a move can: a unit may go to the next
stage if nothing that depends on it stays behind, and to the one before if all it depends on is there. Moves are taken
while they lower the score; every step keeps the partition valid.
"""

from __future__ import annotations

from collections.abc import Callable

from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.program.stages import Stages

__all__ = ["improve"]

Score = Callable[[Stages], tuple[float, ...]]
"""Smaller is better."""


def improve(pieces: WeightedUnits, stage_of: list[int], count: int, score: Score, *, tries: int = 400) -> list[int]:
    """The partition after all moves that help, found in at most so many tries."""
    if count == 1:
        return stage_of
    before, after = pieces.units.before, pieces.after
    best, stage_of = score(pieces.cut(stage_of, count)), list(stage_of)
    improved = True
    while improved and tries > 0:
        improved = False
        for unit, step in _moves(stage_of, count, before, after):
            k = stage_of[unit]
            neighbours = after[unit] if step > 0 else before[unit]
            # An earlier move of this round may have closed the way.
            if stage_of.count(k) == 1 or any(stage_of[u] == k for u in neighbours):
                continue
            tries -= 1
            stage_of[unit] = k + step
            found = score(pieces.cut(stage_of, count))
            if found < best:
                best, improved = found, True
            else:
                stage_of[unit] = k
            if tries <= 0:
                break
    return stage_of


def _moves(
    stage_of: list[int], count: int, before: tuple[frozenset[int], ...], after: list[set[int]]
) -> list[tuple[int, int]]:
    found = []
    for unit, k in enumerate(stage_of):
        if k + 1 < count and all(stage_of[u] > k for u in after[unit]):
            found.append((unit, 1))
        if k > 0 and all(stage_of[u] < k for u in before[unit]):
            found.append((unit, -1))
    return found
