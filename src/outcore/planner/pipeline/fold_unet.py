"""Cutting a U-Net vertically: every encoder level on one rank with the decoder level across from it.

    rank 0   encoder1 ─────────────────────────────── decoder1        stages 0 and 4
    rank 1        └─ encoder2 ─────────────── decoder2 ─┘             stages 1 and 3
    rank 2                └────── bottom ───────┘                     stage 2

Long skips then never leave their rank, and each rank holds maps of one size only (GEMS proposal, section 2.1.2.1). An
encoder level and its decoder level are not one *stage*: everything deeper lies between them in the data flow, and a
stage runs from begin to end. So the network is cut into 2L - 1 stages, and the plan's `placement` folds them onto L
ranks. Any network with nested skips can be folded so; whether it pays is another matter: the outermost rank holds the
largest maps twice, so a cut into runs balanced by memory usually has the smaller peak (`Fold.peak_bytes` says).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.link import Link
from outcore.machine.units import format_bytes
from outcore.planner.partition.partition import Partition, split_by_hand
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.lower import SCHEDULE_NAMES
from outcore.planner.pipeline.schedule_model import Pipeline, Schedule
from outcore.program import Links, Stages, Timeline, compile_program, simulate
from outcore.program.plan.document import Plan, PredictedStep

_MOST_PIECES = 64


@dataclass(frozen=True)
class Fold:
    """A network cut into stages that lie on ranks like the legs of a V."""

    partition: Partition
    placement: tuple[int, ...]
    """Rank of every stage."""
    peak_bytes: tuple[int, ...]
    """The simulated peak of every rank; memory that both its stages hold counts once."""

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Blocks of every stage."""
        return self.partition.names


def split_vertically(
    graph: Graph,
    weights: CallWeights,
    *,
    ranks: int | None = None,
    pipeline: Pipeline | None = None,
    fraction: float = 1.0,
) -> Fold:
    """Fold a network with nested long skips onto ranks.

    Args:
        graph: the network; its skips are looked for between the model's own children.
        weights: of its calls.
        ranks: levels are joined until there are so many; one rank per level if not given.
        pipeline: how it is run; not GEMS, which places its two replicas itself.
        fraction: the part of the recorded batch that a micro-batch is.
    """
    pipeline = pipeline or Pipeline("model_parallel")
    if pipeline.paired:
        raise PlanError("gems places its two replicas itself; fold under model_parallel, gpipe or 1f1b")
    pieces = weigh(graph, weights, find_units(graph, weights, "block")).scaled(fraction, pipeline.pieces)
    levels = _levels(pieces)
    if not levels:
        raise PlanError(f"{graph.root.type} has no nested long skips between its blocks: cut it with split()")
    middle = levels[-1][1] - levels[-1][0] > 1
    most = len(levels) + middle
    ranks = most if ranks is None else ranks
    if not 1 < ranks <= most:
        raise PlanError(f"{graph.root.type} folds onto 2 to {most} ranks, not {ranks}")
    candidates = (_rank_of(pieces, levels, kept) for kept in combinations(range(len(levels)), ranks - 1))
    rank_of = min(candidates, key=lambda r: max(_peaks(pieces, r, ranks, pipeline)))
    stages: list[list[str]] = []
    placement: list[int] = []
    for i, rank in enumerate(rank_of):
        if i == 0 or rank != rank_of[i - 1]:
            stages.append([])
            placement.append(rank)
        stages[-1].extend(pieces.units.units[i].calls)
    partition = split_by_hand(graph, weights, stages, pipeline=pipeline, fraction=fraction)
    return Fold(partition, tuple(placement), _simulated(partition.stages, pipeline, placement, Links()).peak_bytes)


def plan_vertically(
    graph: Graph,
    weights: CallWeights,
    *,
    ranks: int | None = None,
    memory_bytes: int | None = None,
    schedule: Schedule | None = None,
    link: Link | None = None,
    machine: str | None = None,
) -> Plan:
    """The fastest plan that folds a network onto ranks, over schedules and numbers of micro-batches.

    Raises:
        PlanError: the network has no nested skips, or the memory cannot be met; says the smallest that can.
    """
    samples = max((graph.values[v].shape[0] for v in graph.inputs[:1] if graph.values[v].shape), default=1)
    found: list[tuple[PredictedStep, Pipeline, Fold]] = []
    for pieces in (p for p in range(1, min(samples, _MOST_PIECES) + 1) if samples % p == 0):
        for name in ("model_parallel", "gpipe", "1f1b") if schedule is None else (schedule,):
            one = name == "model_parallel"
            pipeline = Pipeline(name, 1 if one else pieces, pieces if one else 1)
            fold = split_vertically(graph, weights, ranks=ranks, pipeline=pipeline, fraction=1 / pieces)
            timeline = _simulated(fold.partition.stages, pipeline, fold.placement, Links(link))
            found.append(
                (PredictedStep(timeline.step_s, timeline.peak_bytes, timeline.bubble, "simulated"), pipeline, fold)
            )
    fits = [row for row in found if memory_bytes is None or max(row[0].peak_bytes) <= memory_bytes]
    if not fits:
        least = min(max(row[0].peak_bytes) for row in found)
        raise PlanError(
            f"{memory_bytes:,} bytes per rank cannot be met by a fold: the smallest that can is {format_bytes(least)} "
            f"(memory_bytes={least}); a cut into runs usually needs less"
        )
    predicted, pipeline, fold = min(fits, key=lambda row: row[0].time_s)
    return Plan(
        graph.fingerprint,
        fold.names,
        pipeline.schedule,
        pipeline.micro_batches,
        pipeline.batches,
        placement=fold.placement,
        machine=machine,
        memory_bytes=memory_bytes,
        predicted=predicted,
        why=(f"folded; fastest of {len(fits)} that fit, of {len(found)} schedules and numbers of micro-batches",),
    )


def _simulated(stages: Stages, pipeline: Pipeline, placement: Sequence[int], links: Links) -> Timeline:
    program = compile_program(
        stages,
        SCHEDULE_NAMES[pipeline.schedule],
        micro_batches=pipeline.micro_batches,
        batches=pipeline.batches,
        placement=placement,
    )
    return simulate(program, stages, links)


def _levels(pieces: WeightedUnits) -> list[tuple[int, int]]:
    """Nested skips, outermost first: unit that makes each, and the first unit that reads it across."""
    levels: list[tuple[int, int]] = []
    inside = (-1, len(pieces))
    for flow in sorted(pieces.flows, key=lambda f: f.producer):
        far = [u for u in flow.users if u > flow.producer + 1]
        if far and inside[0] < flow.producer and max(far) < inside[1]:
            inside = flow.producer, max(far)
            levels.append(inside)
    return levels


def _peaks(pieces: WeightedUnits, rank_of: list[int], ranks: int, pipeline: Pipeline) -> tuple[int, ...]:
    held, weights = pieces.held_bytes(rank_of, ranks), pieces.weight_bytes(rank_of, ranks)
    fixed, update = pieces.fixed_bytes(rank_of, ranks), pieces.update_bytes(rank_of, ranks)
    gradients = [0] * ranks
    for flow in pieces.flows:
        places = {rank_of[u] for u in flow.users} | {rank_of[flow.producer]}
        if flow.has_gradient and len(places) > 1:
            for rank in places:
                gradients[rank] += flow.bytes
    found = []
    for rank in range(ranks):
        inside = [i for i, r in enumerate(rank_of) if r == rank]
        always = fixed[rank] + round((2 + pieces.state_per_parameter) * weights[rank])
        moving = pipeline.in_flight(0, ranks) * held[rank] + gradients[rank]
        found.append(always + max(moving + max(pieces.workspace_bytes[i] for i in inside), update[rank]))
    return tuple(found)


def _rank_of(pieces: WeightedUnits, levels: list[tuple[int, int]], kept: tuple[int, ...]) -> list[int]:
    """The rank of every unit if folds are made at the levels kept."""
    found = []
    for unit in range(len(pieces)):
        found.append(sum(1 for k in kept if levels[k][0] < unit < levels[k][1]))
    return found
