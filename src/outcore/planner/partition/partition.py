"""Cutting a network into stages: by hand, by time, by memory, or for the fastest step under a memory cap.

    split(graph, weights, stages=4)                              equal forward and backward time
    split(graph, weights, stages=4, balance="memory")            smallest largest peak of a rank
    split(graph, weights, stages=4, balance="search", memory_bytes=8 << 30, pipeline=Pipeline("1f1b", 8))
    split_by_hand(graph, weights, [["stem", "layer1"], ["layer2", "head"]])

The network is a general directed acyclic graph, so stages are runs of a linear order of its units. Each of several
orders is cut optimally by dynamic programming, the best is improved by moving single units, and where the graph is
small and has branches an integer program looks at all orders at once (`outcore.planner.partition.strategies`). Under
GEMS a rank holds two stages, and pairs are balanced.

Dynamic programming for pipelines: PipeDream (SOSP 2019), DAPPLE (PPoPP 2021); torchgpipe balances chains by a heuristic
(Bárány and Grinberg, "Block partitions of sequences").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner.partition.strategies import Balance, cut_pieces
from outcore.planner.partition.units import Granularity, Unit, Units, find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink
from outcore.program.plan.stage_names import name_stages, place_calls
from outcore.program.stages import Stages


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
        """The most bytes that each rank holds in a step."""
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
        """Bytes sent between stages in one micro-batch, values and gradients."""
        return sum(e.bytes * len(e.targets) * (2 if e.has_gradient else 1) for e in self.stages.edges)


def split(
    graph: Graph,
    weights: CallWeights,
    *,
    stages: int,
    balance: Balance = "compute",
    granularity: Granularity = "layer",
    pipeline: Pipeline | None = None,
    memory_bytes: int | None = None,
    route: RankLink | None = None,
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
        pipeline: how it will be run, which decides what is in flight; plain model parallelism if not given.
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
    pipeline = pipeline or Pipeline("model_parallel")
    pieces = weigh(graph, weights, units).scaled(fraction, pipeline.pieces)
    stage_of, how = cut_pieces(pieces, stages, balance, pipeline, memory_bytes, route or RankLink())
    return _partition(graph, pieces, stage_of, stages, pipeline, how)


def split_by_hand(
    graph: Graph,
    weights: CallWeights,
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
    pipeline = pipeline or Pipeline("model_parallel")
    pieces = weigh(graph, weights, units).scaled(fraction, pipeline.pieces)
    return _partition(graph, pieces, list(range(len(stages))), len(stages), pipeline, "by hand")


def _refuse_too_few(units: Units, count: int, granularity: Granularity, weights: CallWeights, tied: str) -> None:
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
    graph: Graph, pieces: WeightedUnits, stage_of: Sequence[int], count: int, pipeline: Pipeline, how: str
) -> Partition:
    stages = pieces.cut(stage_of, count)
    copies = {}
    for name, _, users in pieces.parameters:
        places = tuple(sorted({stage_of[u] for u in users}))
        if len(places) > 1:
            copies[name] = places
    return Partition(name_stages(graph, [s.calls for s in stages.stages]), stages, pipeline, copies, how)
