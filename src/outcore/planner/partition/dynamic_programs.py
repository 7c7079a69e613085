"""Cutting one row of units for a balance: which dynamic program answers which question.

balance    one stage per rank                               in pairs (GEMS)
compute    smallest slowest stage, then fewest bytes sent   smallest pair by time
memory     smallest peak, then fewest bytes sent            smallest pair by memory
search     smallest sum of messages, with the slowest       the same without regard of pairs; if a rank is then
           stage counted as often as it repeats             too full, smallest sum over pairs within the cap

In pairs, the first stage lies on a rank with the last, and so on. What a rank holds depends on both of its stages, so
the program grows inwards from both ends, and its state is a pair of places: where the stages on the left end and where
those on the right begin. Each step adds a stage on either side: the next rank.

    |0|  1  |   2   ...   D-3   | D-2 |D-1|        rank 0 holds stages 0 and D-1, rank 1 stages 1 and D-2

All dynamic programs are over where stages end, and work on tables (see `outcore.planner.partition.interval_tables`),
one per stage where stages differ. The k-th stage ends at place j; what came before is summed up in one number per j, so
a row of n places is cut into D stages in D passes over n squared numbers. Each returns the places where stages end, or
None if no cut obeys the limits (an infinite entry is forbidden).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.planner.partition.interval_tables import IntervalTables, Table
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink

_PAIR_STATES = 10_000
"""Pairs of places beyond which ranks are not cut as pairs."""


def cut_line(
    line: IntervalTables, count: int, balance: str, pipeline: Pipeline, cap: float | None, route: RankLink
) -> list[list[int]]:
    """Places where stages end, for each of the few cuts that may be best; empty if the cap cannot be met."""
    limit = np.inf if cap is None else cap
    if pipeline.paired and count > 1:
        return _paired(line, count, balance, pipeline, limit, route)
    always = line.always_bytes()
    memory = [always + line.moving_bytes(pipeline, k, count) for k in range(count)]
    allowed = [m <= limit for m in memory]
    if balance == "memory":
        return _listed(_refined(memory, [line.message_bytes] * count, allowed))
    if balance == "compute":
        return _listed(_refined([line.time_s] * count, [line.message_bytes] * count, allowed))
    messages = line.message_s(route)
    extra = [np.where(a, messages, np.inf) for a in allowed]
    if pipeline.schedule == "model_parallel" or pipeline.pieces == 1:
        return _listed(cheapest(extra))
    busy = [np.where(a, line.time_s + messages, np.inf) for a in allowed]
    repeats = pipeline.pieces - 1 if pipeline.schedule == "1f1b" else pipeline.micro_batches - 1
    return _listed(fastest(busy, extra, repeats) if repeats else cheapest(extra))


def _paired(
    line: IntervalTables, count: int, balance: str, pipeline: Pipeline, limit: float, route: RankLink
) -> list[list[int]]:
    few = count * line.size**2 <= 4 * _PAIR_STATES
    if balance == "compute" and limit == np.inf:
        times = PairedLoads(line.time_s, [line.time_s] * count, middle_twice=True)
        return _listed(smallest_pair(times, count) if few else smallest_maximum([line.time_s] * count))
    found: list[list[int]] = []
    messages = line.message_s(route)
    if balance == "search":
        extra = [messages * (1 + pipeline.batches) / 2] * count
        repeats = (pipeline.micro_batches - 1) * pipeline.batches
        busy = line.time_s + messages
        if not repeats:
            busy, repeats = line.forward_s, pipeline.batches - 1
        found += _listed(fastest([busy] * count, extra, repeats) if repeats else cheapest(extra))
    if not few:
        # Too many places to look at all pairs of them: every stage as if its partner held as much.
        always = line.always_bytes()
        single = [2 * always + line.moving_bytes(pipeline, k, count) for k in range(count)]
        return [*found, *_listed(smallest_maximum(single))]
    ranks = PairedLoads.of(line, pipeline, count)
    if balance == "search" and limit < np.inf:
        for slowest in _limits(line.forward_s, count):
            costs = [np.where(line.forward_s <= slowest, messages, np.inf)] * count
            found += _listed(cheapest_pairs(ranks, costs, count, limit))
    if balance != "search" or not found:
        found += _listed(smallest_pair(ranks, count, limit))
    return found


def _limits(table: Table, count: int) -> list[float]:
    """A few limits of the largest entry, from the smallest possible one upwards."""
    bound = smallest_maximum([table] * count)
    return [] if bound is None else [bound[1] * factor for factor in (1.0, 1.05, 1.2, 1.6)]


def _refined(
    costs: Sequence[Table], messages: Sequence[Table], allowed: Sequence[NDArray[np.bool_]]
) -> tuple[list[int], float] | None:
    """The smallest maximum, and among cuts that reach it the one with the fewest bytes between stages."""
    answer = smallest_maximum([np.where(a, c, np.inf) for c, a in zip(costs, allowed, strict=True)])
    if answer is None:
        return None
    limit = answer[1] * (1 + 1e-12)
    again = cheapest([np.where(a & (c <= limit), m, np.inf) for c, m, a in zip(costs, messages, allowed, strict=True)])
    return answer if again is None else again


def _listed(answer: tuple[list[int], float] | None) -> list[list[int]]:
    return [] if answer is None else [answer[0]]


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
    for limit in _limits_to_try(busy, extra, bound, repeats, candidates):
        if best is not None and repeats * limit >= best[1]:
            break
        found = cheapest([np.where(b <= limit, e, np.inf) for b, e in zip(busy, extra, strict=True)])
        if found is not None:
            value = found[1] + repeats * _largest(busy, found[0])
            if best is None or value < best[1]:
                best = found[0], value
    return best


def _limits_to_try(
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
