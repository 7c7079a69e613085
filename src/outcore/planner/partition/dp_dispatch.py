"""Cutting one row of units for a balance: which dynamic program answers which question.

balance    one stage per rank                               in pairs (GEMS)
compute    smallest slowest stage, then fewest bytes sent   smallest pair by time
memory     smallest peak, then fewest bytes sent            smallest pair by memory
search     smallest sum of messages, with the slowest       the same without regard of pairs; if a rank is then
           stage counted as often as it repeats             too full, smallest sum over pairs within the cap
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outcore.planner.partition.chain_dp import cheapest, fastest, smallest_maximum
from outcore.planner.partition.interval_tables import IntervalTables, Table
from outcore.planner.partition.paired_dp import PairedLoads, cheapest_pairs, smallest_pair
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink

__all__ = ["cut_line"]

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
