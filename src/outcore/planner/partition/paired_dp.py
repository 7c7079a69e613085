"""The best places to cut a row whose stages lie on ranks in pairs (GEMS): the first with the last, and so on.

What a rank holds depends on both of its stages, so the program grows inwards from both ends, and its state is a pair of
places: where the stages on the left end and where those on the right begin. Each step adds a stage on either side:
the next rank.

    |0|  1  |   2   ...   D-3   | D-2 |D-1|        rank 0 holds stages 0 and D-1, rank 1 stages 1 and D-2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.planner.partition.interval_tables import IntervalTables, Table
from outcore.planner.pipeline.schedule_model import Pipeline

__all__ = ["PairedLoads", "cheapest_pairs", "smallest_pair"]


@dataclass(frozen=True)
class PairedLoads:
    """Tables from which the load of a rank follows: what its stages always take, and the larger of what they move."""

    always: Table
    moving: Sequence[Table]
    """What each stage holds only while a step runs."""
    single: Table | None = None
    incoming: Table | None = None
    """Bytes of a stage's input, which is received while the other stage of its rank finishes a batch."""
    returning: bool = False
    """Whether the first stage comes after the second again."""
    middle_twice: bool = False
    """Whether the middle rank of an odd number counts its stage for both replicas."""

    @classmethod
    def of(cls, line: IntervalTables, pipeline: Pipeline, count: int) -> PairedLoads:
        """The memory of ranks."""
        moving = [line.moving_bytes(pipeline, k, count) for k in range(count)]
        if pipeline.batches == 1:
            return cls(line.always_bytes(), moving)
        return cls(line.always_bytes(), moving, line.single_bytes(), line.incoming_bytes, pipeline.batches > 2)

    def pair(self, first: int, count: int, begin: int, end: int, inner: slice) -> Table:
        """The load of a rank with stages [begin, b) and [c, end), for all b (rows) and c (columns) inside."""
        left = self.moving[first][begin, inner][:, None]
        right = self.moving[count - 1 - first][inner, end][None, :]
        moving = np.maximum(left, right)
        if self.single is not None and self.incoming is not None:
            moving = np.maximum(moving, self.single[begin, inner][:, None] + self.incoming[inner, end][None, :])
            if self.returning:
                moving = np.maximum(moving, self.single[inner, end][None, :] + self.incoming[begin, inner][:, None])
        table: Table = self.always[begin, inner][:, None] + self.always[inner, end][None, :] + moving
        return table

    def middle(self, count: int) -> Table:
        """The load of the middle rank of an odd number, which has one stage for both replicas."""
        moving = self.moving[count // 2]
        if self.single is not None and self.incoming is not None:
            moving = np.maximum(moving, self.single + self.incoming)
        return self.always * (2 if self.middle_twice else 1) + moving


def smallest_pair(ranks: PairedLoads, count: int, cap: float = np.inf) -> tuple[list[int], float] | None:
    """Ends of stages that make the largest load of a rank smallest, and that load; nothing above `cap` is looked at."""
    return _grow(ranks, None, count, cap)


def cheapest_pairs(
    ranks: PairedLoads, costs: Sequence[Table], count: int, cap: float = np.inf
) -> tuple[list[int], float] | None:
    """Ends of stages whose costs have the smallest sum while no rank has a load above `cap`."""
    return _grow(ranks, costs, count, cap)


def _grow(ranks: PairedLoads, costs: Sequence[Table] | None, count: int, cap: float) -> tuple[list[int], float] | None:
    size = ranks.always.shape[0] - 1
    reach = np.full((size + 1, size + 1), np.inf)
    reach[0, size] = 0.0
    trail: list[NDArray[np.int64]] = []
    middle = np.arange(size + 1)
    for pair in range(count // 2):
        nxt, back = np.full_like(reach, np.inf), np.full((*reach.shape, 2), -1, dtype=np.int64)
        for a, d in zip(*np.nonzero(np.isfinite(reach)), strict=True):
            inner = slice(a + 1, d)
            load = ranks.pair(pair, count, int(a), int(d), inner)
            if costs is None:
                value = np.maximum(load, reach[a, d])
            else:
                value = reach[a, d] + costs[pair][a, inner][:, None] + costs[count - 1 - pair][inner, d][None, :]
            better = (load <= cap) & (value < nxt[inner, inner])
            nxt[inner, inner] = np.where(better, value, nxt[inner, inner])
            back[inner, inner][better] = (a, d)
        if count % 2 == 0 and pair == count // 2 - 1:
            nxt[middle[:, None] != middle[None, :]] = np.inf
        else:  # more stages have to fit between
            nxt[middle[:, None] >= middle[None, :]] = np.inf
        reach = nxt
        trail.append(back)
    if count % 2:
        load = ranks.middle(count)
        last = np.maximum(reach, load) if costs is None else reach + costs[count // 2]
        reach = np.where(load <= cap, last, np.inf)
    b, c = (int(x) for x in np.unravel_index(np.argmin(reach), reach.shape))
    if not np.isfinite(reach[b, c]):
        return None
    left, right, best = [b], [c] if count % 2 else [], float(reach[b, c])
    for back in reversed(trail):
        b, c = (int(x) for x in back[b, c])
        left.append(b)
        right.append(c)
    return [*left[-2::-1], *right], best
