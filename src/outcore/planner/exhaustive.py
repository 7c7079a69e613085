"""The best of all partitions, by looking at every one: for graphs so small that this is quick.

Units are numbered in an order of execution, so a partition grows unit by unit: each may go into the stage of the latest
unit it depends on, or any later one. A branch is left as soon as too few units remain to fill the stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from outcore.planner.pieces import Pieces

__all__ = ["all_partitions"]


def all_partitions(pieces: Pieces, count: int, most: int) -> list[list[int]] | None:
    """Every valid way to put units into `count` stages, none empty; None if there are more than `most`."""
    if count == 1:
        return [[0] * len(pieces)]
    found = []
    for stage_of in _extend(pieces, count, [], set()):
        found.append(stage_of)
        if len(found) > most:
            return None
    return found


def _extend(pieces: Pieces, count: int, stage_of: list[int], used: set[int]) -> Iterator[list[int]]:
    unit, size = len(stage_of), len(pieces)
    if count - len(used) > size - unit:
        return
    if unit == size:
        yield list(stage_of)
        return
    first = max((stage_of[u] for u in pieces.units.before[unit]), default=0)
    for k in range(first, count):
        stage_of.append(k)
        yield from _extend(pieces, count, stage_of, used | {k})
        stage_of.pop()
