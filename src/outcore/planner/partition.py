"""Cutting a network into stages: by hand, by time, by memory, or for the fastest step under a memory cap.

    split(graph, weights, stages=4)                              equal forward and backward time
    split(graph, weights, stages=4, balance="memory")            smallest largest peak of a rank
    split(graph, weights, stages=4, balance="search", memory_bytes=8 << 30, pipeline=Pipeline("1f1b", 8))
    split_by_hand(graph, weights, [["stem", "layer1"], ["layer2", "head"]])

The network is a general directed acyclic graph, so stages are runs of a linear order of its units. Each of several
orders is cut optimally by dynamic programming, the best is improved by moving single units, and where the graph is
small and has branches an integer program looks at all orders at once. Under GEMS a rank holds two stages, and pairs
are balanced.

Dynamic programming for pipelines: PipeDream (SOSP 2019), DAPPLE (PPoPP 2021); torchgpipe balances chains by a heuristic
(Bárány and Grinberg, "Block partitions of sequences").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.plan_document import name_stages, place_calls
from outcore.planner.chain import cheapest, fastest, smallest_maximum, smallest_pair
from outcore.planner.integer import Aim, solve_integer
from outcore.planner.line import Line, Table
from outcore.planner.moves import improve
from outcore.planner.orders import coarse_places, is_row, linear_orders
from outcore.planner.pieces import Pieces, weigh
from outcore.planner.pipeline import Pipeline, Route
from outcore.planner.units import Granularity, Unit, Units, find_units
from outcore.planner.weights import Weights
from outcore.program.stages import Stages

__all__ = ["Balance", "Partition", "QuickCut", "cut_pieces", "split", "split_by_hand"]

Balance = Literal["compute", "memory", "search"]

_PAIR_PLACES = 64
_INTEGER_VARIABLES = 120


@dataclass(frozen=True)
class Partition:
    """A network cut into stages, and how good the cut is."""

    names: tuple[tuple[str, ...], ...]
    """Blocks or calls of every stage, as a plan names them."""
    stages: Stages
    pipeline: Pipeline
    tied: dict[str, tuple[int, ...]]
    """Parameters that several stages hold a copy of."""
    how: str

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of every rank."""
        return self.pipeline.peak_bytes(self.stages)

    @property
    def busiest_s(self) -> float:
        """Forward and backward of the slowest stage."""
        return max(s.forward_s + s.backward_s for s in self.stages.stages)

    @property
    def time_imbalance(self) -> float:
        """The slowest stage over the mean; 1 is perfect."""
        times = [s.forward_s + s.backward_s for s in self.stages.stages]
        return max(times) * len(times) / sum(times) if sum(times) else 1.0

    @property
    def memory_imbalance(self) -> float:
        """The largest peak of a rank over the mean; 1 is perfect."""
        peaks = self.peak_bytes
        return max(peaks) * len(peaks) / sum(peaks) if sum(peaks) else 1.0

    @property
    def message_bytes(self) -> int:
        """What crosses between stages in one micro-batch, values and gradients."""
        return sum(e.bytes * len(e.targets) * (2 if e.has_gradient else 1) for e in self.stages.edges)


def split(
    graph: Graph,
    weights: Weights,
    *,
    stages: int,
    balance: Balance = "compute",
    granularity: Granularity = "layer",
    pipeline: Pipeline | None = None,
    memory_bytes: int | None = None,
    route: Route | None = None,
    tied: Literal["together", "copies"] = "together",
    fraction: float = 1.0,
) -> Partition:
    """Cut a network into stages.

    Args:
        graph: the network.
        weights: of its calls, for the batch it was recorded with.
        stages: how many.
        balance: what to make small: the time of the slowest stage, the peak of the largest rank, or the step.
        granularity: "block", "layer", or modules down to a depth.
        pipeline: how it will be run, which decides what is in flight; plain model parallelism if not told.
        memory_bytes: what no rank may exceed.
        route: the link between ranks, for "search".
        tied: whether calls that share a parameter stay together.
        fraction: the part of the recorded batch that a micro-batch is.

    Raises:
        PlanError: there are fewer units than stages, or the cap cannot be met; says what could.
    """
    if balance not in get_args(Balance):
        raise PlanError(f"no balance {balance!r}; there are {', '.join(get_args(Balance))}, or give stages by hand")
    units = find_units(graph, weights, granularity, tied)
    _refuse_too_few(units, stages, granularity, weights, tied)
    pieces = weigh(graph, weights, units).scaled(fraction)
    pipeline = pipeline or Pipeline("model_parallel")
    stage_of, how = cut_pieces(pieces, stages, balance, pipeline, memory_bytes, route or Route())
    return _partition(graph, pieces, stage_of, stages, pipeline, how)


def split_by_hand(
    graph: Graph,
    weights: Weights,
    stages: Sequence[Sequence[str]],
    *,
    pipeline: Pipeline | None = None,
    fraction: float = 1.0,
) -> Partition:
    """The partition that puts the named blocks (or calls) into each stage; raises `PlanError` naming what is wrong."""
    placed = place_calls(graph, stages)
    groups = [tuple(c for c in graph.calls if placed[c] == k) for k in range(len(stages))]
    units = Units(
        tuple(Unit(group[0], tuple(names), group) for group, names in zip(groups, stages, strict=True)),
        tuple(
            frozenset(
                placed[p]
                for call in group
                for v in graph.calls[call].inputs
                if (p := graph.values[v].producer) is not None and placed[p] != k
            )
            for k, group in enumerate(groups)
        ),
    )
    pieces = weigh(graph, weights, units).scaled(fraction)
    return _partition(
        graph, pieces, list(range(len(stages))), len(stages), pipeline or Pipeline("model_parallel"), "by hand"
    )


def cut_pieces(
    pieces: Pieces, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> tuple[list[int], str]:
    """The stage of every unit, and how it was found."""
    score = _score(balance, pipeline, cap, route)
    found: list[tuple[tuple[float, ...], list[int], str]] = []
    for number, order in enumerate(linear_orders(pieces)):
        if number and len(pieces) > 800:
            break
        most = max(2 * count, _PAIR_PLACES) if pipeline.paired else 1600 if balance != "search" else 300
        line = Line(pieces, order, coarse_places(pieces, order, most))
        if count > line.size:
            continue
        ends = _cut_line(line, count, balance, pipeline, cap, route)
        if ends is not None:
            stage_of = line.stage_of(ends)
            how = "chain in recorded order" if number == 0 else f"chain in order {number}"
            found.append((score(pieces.cut(stage_of, count)), stage_of, how))
    branches = not is_row(pieces)
    if found:
        best = min(found, key=lambda row: row[0])
        if branches or pipeline.paired:
            # A try costs as much as there is to look at.
            better = improve(pieces, best[1], count, score, tries=min(400, 100_000 // (len(pieces) + 1)))
            if better != best[1]:
                best = score(pieces.cut(better, count)), better, f"{best[2]}, then moves"
            found.append(best)
    if branches and len(pieces) * (count - 1) <= _INTEGER_VARIABLES and not _is_ideal(pieces, count, balance, found):
        aim = _aim(balance, pipeline, cap, route)
        exact = solve_integer(pieces, count, pipeline, aim) if aim is not None else None
        if exact is not None:
            found.append((score(pieces.cut(exact, count)), exact, "integer program"))
    allowed = [row for row in found if cap is None or max(pipeline.peak_bytes(pieces.cut(row[1], count))) <= cap]
    if not allowed:
        raise PlanError(_refusal(pieces, count, pipeline, cap, route))
    best = min(allowed, key=lambda row: row[0])
    return best[1], best[2]


class QuickCut:
    """Cuts at few places of the recorded order only, for ranking many candidates; tables are kept between cuts."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._lines: dict[int, Line] = {}

    def cut(
        self, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
    ) -> list[int] | None:
        """The stage of every unit, or None if these places do not do."""
        most = max(3 * count, 24 if pipeline.paired else 64)
        if most not in self._lines:
            order = tuple(range(len(self.pieces)))
            self._lines[most] = Line(self.pieces, order, coarse_places(self.pieces, order, most))
        line = self._lines[most]
        if count > line.size:
            return None
        ends = _cut_line(line, count, balance, pipeline, cap, route)
        return None if ends is None else line.stage_of(ends)


def _cut_line(
    line: Line, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> list[int] | None:
    always = line.always_bytes()
    moving = [line.moving_bytes(pipeline, k, count) for k in range(count)]
    if pipeline.paired and line.size > 2 * _PAIR_PLACES:
        # Too many places to look at all pairs of them: every stage as if its partner held as much.
        answer = smallest_maximum([2 * always + m for m in moving])
        return None if answer is None else answer[0]
    if pipeline.paired and count > 1:
        if balance == "compute" and cap is None:
            answer = smallest_pair(line.time_s, [line.time_s] * count, count=count)
        else:
            answer = smallest_pair(always, moving, np.inf if cap is None else cap, count)
        return None if answer is None else answer[0]
    memory = [always + m for m in moving]
    allowed = [m <= (np.inf if cap is None else cap) for m in memory]
    if balance == "memory":
        return _refined(memory, [line.message_bytes] * count, allowed)
    if balance == "compute":
        return _refined([line.time_s] * count, [line.message_bytes] * count, allowed)
    messages = line.message_s(route)
    extra = [np.where(a, messages, np.inf) for a in allowed]
    if pipeline.schedule == "model_parallel" or pipeline.micro_batches == 1:
        answer = cheapest(extra)
    else:
        busy = [np.where(a, line.time_s + messages, np.inf) for a in allowed]
        answer = fastest(busy, extra, pipeline.micro_batches - 1)
    return None if answer is None else answer[0]


def _refined(
    costs: Sequence[Table], messages: Sequence[Table], allowed: Sequence[NDArray[np.bool_]]
) -> list[int] | None:
    """The smallest maximum, and among cuts that reach it the one with the fewest bytes between stages."""
    answer = smallest_maximum([np.where(a, c, np.inf) for c, a in zip(costs, allowed, strict=True)])
    if answer is None:
        return None
    limit = answer[1] * (1 + 1e-12)
    again = cheapest([np.where(a & (c <= limit), m, np.inf) for c, m, a in zip(costs, messages, allowed, strict=True)])
    return answer[0] if again is None else again[0]


def _score(
    balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> Callable[[Stages], tuple[float, ...]]:
    def score(stages: Stages) -> tuple[float, ...]:
        peak = float(max(pipeline.peak_bytes(stages)))
        excess = max(0.0, peak - cap) if cap is not None else 0.0
        if balance == "search":
            return excess, pipeline.step_s(stages, route)
        sent = float(sum(e.bytes * len(e.targets) * (2 if e.has_gradient else 1) for e in stages.edges))
        if balance == "memory":
            return excess, peak, sent
        times = [s.forward_s + s.backward_s for s in stages.stages]
        if pipeline.paired and len(times) > 1:
            # What a rank has to do, and the longer of its stages once more: the other replica waits for it.
            times = [a + b + max(a, b) for a, b in zip(times, reversed(times), strict=True)]
        return excess, max(times), sent

    return score


def _aim(balance: Balance, pipeline: Pipeline, cap: float | None, route: Route) -> Aim | None:
    limit = np.inf if cap is None else cap
    if balance == "compute":
        return Aim(busiest=1.0, cap_bytes=limit)
    if balance == "memory":
        return Aim(memory=1.0, cap_bytes=limit)
    if pipeline.paired:
        return None
    repeats = 0 if pipeline.schedule == "model_parallel" else pipeline.micro_batches - 1
    return Aim(busiest=float(repeats), messages=1.0, cap_bytes=limit, route=route)


def _is_ideal(
    pieces: Pieces, count: int, balance: Balance, found: list[tuple[tuple[float, ...], list[int], str]]
) -> bool:
    """Whether no cut can be better: the slowest stage is the slowest unit, or all are equal."""
    if balance != "compute" or not found:
        return False
    bound = max(max(pieces.time_s), sum(pieces.time_s) / count)
    return min(row[0] for row in found)[1] <= bound * (1 + 1e-12)


def _refusal(pieces: Pieces, count: int, pipeline: Pipeline, cap: float | None, route: Route) -> str:
    if cap is None:
        return f"no way was found to cut {len(pieces)} units into {count} stages"
    stage_of, _ = cut_pieces(pieces, count, "memory", pipeline, None, route)
    least = max(pipeline.peak_bytes(pieces.cut(stage_of, count)))
    return (
        f"{count} stages need {least:,} bytes on the largest rank under {pipeline.schedule}, but only {int(cap):,} are "
        f"allowed; give memory_bytes={least}, more stages, or smaller micro-batches"
    )


def _refuse_too_few(units: Units, count: int, granularity: Granularity, weights: Weights, tied: str) -> None:
    if count < 1:
        raise PlanError(f"a network has at least 1 stage, not {count}")
    if len(units) >= count:
        return
    finer = '; try granularity="layer"' if granularity != "layer" else ""
    if tied == "together" and weights.tied:
        name, calls = max(weights.tied.items(), key=lambda row: len(row[1]))
        finer += f'; {name} is shared by {calls[0]} and {calls[-1]}: tied="copies" keeps a copy on each rank'
    raise PlanError(f"{count} stages asked for, but only {len(units)} units can be told apart{finer}")


def _partition(
    graph: Graph, pieces: Pieces, stage_of: Sequence[int], count: int, pipeline: Pipeline, how: str
) -> Partition:
    stages = pieces.cut(stage_of, count)
    copies = {}
    for name, _, users in pieces.parameters:
        places = tuple(sorted({stage_of[u] for u in users}))
        if len(places) > 1:
            copies[name] = places
    return Partition(name_stages(graph, [s.calls for s in stages.stages]), stages, pipeline, copies, how)
