"""The best of all partitions, by looking at every one: for graphs so small that this is quick.

Units are numbered in an order of execution, so a partition grows unit by unit: each may go into the stage of the latest
unit it depends on, or any later one. A branch is left as soon as too few units remain to fill the stages.
"""

from __future__ import annotations

from math import comb

from outcore.planner.partition.weighted_units import WeightedUnits

__all__ = ["all_partitions"]


_STEPS = 40
"""Steps for each partition that may be found, after which the search stops: most branches may lead nowhere."""


def all_partitions(pieces: WeightedUnits, count: int, most: int) -> list[list[int]] | None:
    """Every valid way to put units into `count` stages, none empty; None if there are more than `most`."""
    before, size = pieces.units.before, len(pieces)
    if comb(size - 1, count - 1) > most:  # so many there are of the recorded order alone
        return None
    found: list[list[int]] = []
    # Stages of the first units, and which stages have a unit, as bits.
    work: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for _ in range(_STEPS * most):
        if not work:
            return found
        stage_of, used = work.pop()
        unit = len(stage_of)
        if count - used.bit_count() > size - unit:
            continue
        if unit == size:
            found.append(list(stage_of))
            if len(found) > most:
                return None
            continue
        first = max((stage_of[u] for u in before[unit]), default=0)
        work.extend(((*stage_of, k), used | 1 << k) for k in range(count - 1, first - 1, -1))
    return None if work else found
