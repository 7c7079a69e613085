"""The best places to cut a row: dynamic programs over where stages end.

All work on tables (see `outcore.planner.line`), one per stage where stages differ. The k-th stage ends at place j; what
came before is summed up in one number per j, so a row of n places is cut into D stages in D passes over n squared
numbers. Each returns the places where stages end, or None if no cut obeys the limits (an infinite entry is forbidden).

Pairs of ranks (GEMS) hold the first stage with the last, the second with the last but one, and so on: the program grows
inwards from both ends, and its state is a pair of places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from outcore.planner.line import Table

__all__ = ["cheapest", "fastest", "smallest_maximum", "smallest_pair"]


def smallest_maximum(costs: Sequence[Table]) -> tuple[list[int], float] | None:
    """Ends of the stages that make the largest cost smallest, and that cost."""
    return _solve(costs, np.maximum)


def cheapest(costs: Sequence[Table]) -> tuple[list[int], float] | None:
    """Ends of the stages whose costs have the smallest sum, and that sum."""
    return _solve(costs, np.add)


def fastest(
    busy: Sequence[Table], extra: Sequence[Table], repeats: float, candidates: int = 24
) -> tuple[list[int], float] | None:
    """Ends of the stages with the smallest sum of `extra` plus `repeats` times the largest of `busy`.

    The largest is one of the entries of `busy`. For each candidate limit the smallest sum below it is found; all
    entries are candidates if there are few, otherwise as many as told, from the smallest possible maximum upwards.
    """
    bound = smallest_maximum(busy)
    if bound is None:
        return None
    entries = np.unique(np.concatenate([t[np.isfinite(t) & (t >= bound[1])] for t in busy]))
    if len(entries) > 16 * candidates:
        # No cut pays for more than what all messages together could save.
        spread = cheapest(extra)
        highest = bound[1] * 2 if spread is None else bound[1] + max(0.0, _value(extra, bound[0]) - spread[1]) / repeats
        near = entries[entries <= highest]
        entries = near[np.unique(np.linspace(0, len(near) - 1, candidates).astype(int))] if len(near) else entries[:1]
    best: tuple[list[int], float] | None = None
    for limit in entries:
        if best is not None and repeats * limit >= best[1]:
            break
        found = cheapest([np.where(b <= limit, e, np.inf) for b, e in zip(busy, extra, strict=True)])
        if found is not None:
            value = found[1] + repeats * _largest(busy, found[0])
            if best is None or value < best[1]:
                best = found[0], value
    return best


def smallest_pair(
    always: Table, moving: Sequence[Table], cap: float = np.inf, count: int = 2
) -> tuple[list[int], float] | None:
    """Ends of `count` stages that make the largest rank smallest, if rank r holds stages r and count-1-r.

    A rank takes what both stages always hold, and the larger of what they hold in motion. `cap` only cuts the search
    short: nothing above it is looked at.
    """
    size = always.shape[0] - 1
    if count == 1:
        value = float(2 * always[0, size] + moving[0][0, size])
        return ([size], value) if value <= cap else None
    reach = np.full((size + 1, size + 1), np.inf)
    reach[0, size] = 0.0
    trail: list[NDArray[np.int64]] = []
    for pair in range(count // 2):
        left, right = moving[pair], moving[count - 1 - pair]
        nxt, back = np.full_like(reach, np.inf), np.full((*reach.shape, 2), -1, dtype=np.int64)
        for a, d in zip(*np.nonzero(reach <= cap), strict=True):
            # Stage `pair` is [a, b), its partner [c, d): rows b, columns c.
            inner = slice(a + 1, d)
            rank = always[a, inner][:, None] + always[inner, d][None, :]
            rank = rank + np.maximum(left[a, inner][:, None], right[inner, d][None, :])
            value = np.maximum(rank, reach[a, d])
            better = value < nxt[inner, inner]
            nxt[inner, inner] = np.where(better, value, nxt[inner, inner])
            back[inner, inner][better] = (a, d)
        middle = np.arange(size + 1)
        if count % 2 == 0 and pair == count // 2 - 1:
            nxt[middle[:, None] != middle[None, :]] = np.inf
        else:  # more stages have to fit between
            nxt[middle[:, None] >= middle[None, :]] = np.inf
        reach = nxt
        trail.append(back)
    if count % 2:
        reach = np.maximum(reach, 2 * always + moving[count // 2])
    b, c = (int(x) for x in np.unravel_index(np.argmin(reach), reach.shape))
    largest = float(reach[b, c])
    if not largest <= cap or not np.isfinite(largest):
        return None
    left_ends, right_ends = [b], [c] if count % 2 else []
    for back in reversed(trail):
        a, d = (int(x) for x in back[b, c])
        left_ends.append(a)
        right_ends.append(d)
        b, c = a, d
    return [*left_ends[-2::-1], *right_ends], largest


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
