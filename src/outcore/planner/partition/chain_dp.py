"""The best places to cut a row: dynamic programs over where stages end.

All work on tables (see `outcore.planner.partition.interval_tables`), one per stage where stages differ. The k-th stage
ends at place j; what came before is summed up in one number per j, so a row of n places is cut into D stages in D
passes over n squared numbers. Each returns the places where stages end, or None if no cut obeys the limits (an infinite
entry is forbidden).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outcore.planner.partition.interval_tables import Table

__all__ = ["cheapest", "fastest", "smallest_maximum"]


def smallest_maximum(costs: Sequence[Table]) -> tuple[list[int], float] | None:
    """Ends of the stages that make the largest cost smallest, and that cost."""
    return _solve(costs, np.maximum)


def cheapest(costs: Sequence[Table]) -> tuple[list[int], float] | None:
    """Ends of the stages whose costs have the smallest sum, and that sum."""
    return _solve(costs, np.add)


def fastest(
    busy: Sequence[Table], extra: Sequence[Table], repeats: float, candidates: int = 12
) -> tuple[list[int], float] | None:
    """Ends of the stages with the smallest sum of `extra` plus `repeats` times the largest of `busy`.

    For each candidate limit of the largest, the smallest sum below it is found; all entries of `busy` are candidates if
    there are few, otherwise as many limits as `candidates` says, from the smallest possible maximum upwards.
    """
    bound = smallest_maximum(busy)
    if bound is None:
        return None
    best: tuple[list[int], float] | None = None
    for limit in _limits(busy, extra, bound, repeats, candidates):
        if best is not None and repeats * limit >= best[1]:
            break
        found = cheapest([np.where(b <= limit, e, np.inf) for b, e in zip(busy, extra, strict=True)])
        if found is not None:
            value = found[1] + repeats * _largest(busy, found[0])
            if best is None or value < best[1]:
                best = found[0], value
    return best


def _limits(
    busy: Sequence[Table], extra: Sequence[Table], bound: tuple[list[int], float], repeats: float, candidates: int
) -> list[float]:
    """Limits of the largest entry to try, ascending: all there are if these are few, otherwise some."""
    if sum(t.size for t in busy) <= 20_000:
        entries = np.unique(np.concatenate([t[np.isfinite(t) & (t >= bound[1])] for t in busy]))
        if len(entries) <= 16 * candidates:
            return [float(entry) for entry in entries]
    # No cut pays for more than what all messages together could save.
    spread = cheapest(extra)
    highest = bound[1] * 2 if spread is None else bound[1] + max(0.0, _value(extra, bound[0]) - spread[1]) / repeats
    steps = (np.arange(candidates) / max(1, candidates - 1)) ** 2
    return [bound[1] * (1 + 1e-12) + (highest - bound[1]) * float(step) for step in steps]


def _solve(costs: Sequence[Table], combine: Callable[[Table, Table], Table]) -> tuple[list[int], float] | None:
    size = costs[0].shape[0] - 1
    best = costs[0][0].copy()
    trail = []
    for cost in costs[1:]:
        table = combine(best[:, None], cost)
        back = np.argmin(table, axis=0)
        best = np.asarray(table[back, np.arange(size + 1)])
        trail.append(back)
    if not np.isfinite(best[size]):
        return None
    ends = [size]
    for back in reversed(trail):
        ends.append(int(back[ends[-1]]))
    return ends[::-1], float(best[size])


def _value(tables: Sequence[Table], ends: Sequence[int]) -> float:
    return sum(float(t[a, b]) for t, a, b in zip(tables, [0, *ends], ends, strict=False))


def _largest(tables: Sequence[Table], ends: Sequence[int]) -> float:
    return max(float(t[a, b]) for t, a, b in zip(tables, [0, *ends], ends, strict=False))
