"""From a graph, its weights and a number of devices to a plan.

Every way to share the devices (stages x replicas), every schedule and every number of micro-batches that divides the
batch is a candidate. Each is cut quickly and ranked by closed forms; the best of them are cut with full effort,
compiled and simulated, and the fastest that stays within the memory of a rank becomes the plan, with the others as
runners-up.

The batch a step trains on is the one the graph was recorded with, whatever the plan: pieces of it go through the
pipeline together (GPipe, 1F1B) or one after the other (model parallelism, GEMS), on all replicas at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.link import Link
from outcore.machine.units import format_bytes, format_time
from outcore.plan_document import Plan, Predicted, name_stages
from outcore.planner.cutting import Balance, QuickCut, cut_pieces
from outcore.planner.judge import judge
from outcore.planner.pieces import Pieces, weigh
from outcore.planner.pipeline import SCHEDULES, Pipeline, Route, Schedule
from outcore.planner.units import Granularity, find_units
from outcore.planner.weights import Weights
from outcore.program.stages import Stages

__all__ = ["plan"]

_SIMULATED = 4
_MOST_PIECES = 64
_MOST_STAGES = 64


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A way to share the devices, with what it is expected to take."""

    stages: int
    replicas: int
    pipeline: Pipeline
    fraction: float
    time_s: float = 0.0
    peak_bytes: int = 0

    def __str__(self) -> str:
        p = self.pipeline
        return f"{p.schedule}, {self.stages} stages x {self.replicas}, {p.micro_batches} micro-batches x {p.batches}"


def plan(
    graph: Graph,
    weights: Weights,
    *,
    devices: int,
    memory_bytes: int | None = None,
    balance: Balance | None = None,
    schedule: Schedule | None = None,
    link: Link | Route | None = None,
    granularity: Granularity = "layer",
    tied: Literal["together", "copies"] = "together",
    machine: str | None = None,
) -> Plan:
    """The fastest plan for a network on so many devices.

    Args:
        graph: the network, recorded with the batch of one step.
        weights: of its calls.
        devices: all of them are used.
        memory_bytes: what no rank may exceed.
        balance: "compute" or "memory" to cut by; the fastest step if not told.
        schedule: the only one to look at.
        link: between ranks; 12 GB/s if not told.
        granularity: how fine the parts are.
        tied: whether calls that share a parameter stay together.
        machine: fingerprint to note in the plan.

    Raises:
        PlanError: the memory cannot be met; says the smallest that can, and how many ranks would do.
    """
    if devices < 1:
        raise PlanError(f"a plan needs at least 1 device, not {devices}")
    route = Route(link.away_bytes_per_s, link.latency_s) if isinstance(link, Link) else link or Route()
    pieces = weigh(graph, weights, find_units(graph, weights, granularity, tied))
    samples = max((graph.values[v].shape[0] for v in graph.inputs[:1] if graph.values[v].shape), default=1)
    candidates = list(_candidates(len(pieces), devices, samples, schedule))
    if not candidates:
        raise PlanError(
            f"{devices} devices cannot share {len(pieces)} units and a batch of {samples} under {schedule or 'any'} "
            "schedule; use fewer devices, a larger batch or a finer granularity"
        )
    kind: Balance = balance or "search"
    ranked = _rank(pieces, candidates, kind, memory_bytes, route)
    found: list[tuple[Predicted, _Candidate, Stages]] = []
    for candidate in _finalists(ranked):
        judged = _judged(pieces, candidate, kind, memory_bytes, route)
        if judged is not None:
            found.append((judged[0], candidate, judged[1]))
    if not found and memory_bytes is not None:
        for candidate in _small(candidates):
            judged = _smallest_cut(pieces, candidate, memory_bytes, route)
            if judged is not None:
                found.append((judged[0], candidate, judged[1]))
    if not found:
        raise PlanError(_refusal(pieces, candidates, devices, samples, schedule, memory_bytes, route))
    found.sort(key=lambda row: row[0].time_s)
    predicted, best, stages = found[0]
    placed = {call: k for k, stage in enumerate(stages.stages) for call in stage.calls}
    copies: dict[str, tuple[int, ...]] = {}
    for name, users in weights.tied.items():
        places = tuple(sorted({placed[c] for c in users}))
        if len(places) > 1:
            copies[name] = places
    return Plan(
        graph.fingerprint,
        name_stages(graph, [s.calls for s in stages.stages]),
        best.pipeline.schedule,
        best.pipeline.micro_batches,
        best.pipeline.batches,
        best.replicas,
        exactness="bitwise" if best.replicas == 1 and not best.pipeline.paired and not copies else "reassociated",
        tied=copies,
        machine=machine,
        memory_bytes=memory_bytes,
        predicted=predicted,
        why=_why(found, len(candidates)),
    )


def _candidates(units: int, devices: int, samples: int, schedule: Schedule | None) -> Iterator[_Candidate]:
    for stages in range(1, min(devices, units) + 1):
        replicas, rest = divmod(devices, stages)
        if rest or samples % replicas:
            continue
        share = samples // replicas
        for count in (p for p in range(1, min(share, _MOST_PIECES) + 1) if share % p == 0):
            for name in SCHEDULES if schedule is None else (schedule,):
                if stages == 1 and name != "model_parallel" and schedule is None:
                    continue
                for pipeline in _pipelines(name, count):
                    yield _Candidate(stages, replicas, pipeline, 1 / (replicas * count))


def _pipelines(schedule: Schedule, pieces: int) -> Iterator[Pipeline]:
    if schedule == "model_parallel":
        yield Pipeline(schedule, 1, pieces)
    elif schedule == "gems":
        for inside in (1, 2, 4):
            if pieces % inside == 0 and pieces // inside > 1:
                yield Pipeline(schedule, inside, pieces // inside)
    elif pieces > 1:
        yield Pipeline(schedule, pieces, 1)


def _rank(
    pieces: Pieces, candidates: list[_Candidate], balance: Balance, cap: float | None, route: Route
) -> list[_Candidate]:
    """The candidates that a quick cut makes fit, the fastest first."""
    ranked = []
    scaled = {c.fraction: QuickCut(pieces.scaled(c.fraction)) for c in candidates}
    for c in candidates:
        quick = scaled[c.fraction]
        stage_of = quick.cut(c.stages, balance, c.pipeline, cap, route)
        if stage_of is None:
            continue
        stages = quick.pieces.cut(stage_of, c.stages)
        time_s = c.pipeline.step_s(stages, route, c.replicas)
        peak = max(c.pipeline.peak_bytes(stages))
        ranked.append(_Candidate(c.stages, c.replicas, c.pipeline, c.fraction, time_s, peak))
    return sorted(ranked, key=lambda c: (c.time_s, c.peak_bytes))


def _finalists(ranked: list[_Candidate]) -> list[_Candidate]:
    """The best few, with the best of every schedule and of every number of stages among them."""
    chosen = dict.fromkeys(ranked[:_SIMULATED])
    seen: set[object] = set()
    for candidate in ranked:
        for kind in (candidate.pipeline.schedule, candidate.stages):
            if kind not in seen:
                seen.add(kind)
                chosen[candidate] = None
    if ranked:
        chosen[min(ranked, key=lambda c: c.peak_bytes)] = None
    return list(chosen)


def _judged(
    pieces: Pieces, candidate: _Candidate, balance: Balance, cap: float | None, route: Route
) -> tuple[Predicted, Stages] | None:
    """The candidate cut with full effort and simulated; cut again under a lower cap while the simulator disagrees."""
    part = pieces.scaled(candidate.fraction)
    limit = cap
    for _ in range(4):
        try:
            stage_of, _ = cut_pieces(part, candidate.stages, balance, candidate.pipeline, limit, route)
        except PlanError:
            return None
        stages = part.cut(stage_of, candidate.stages)
        predicted = judge(stages, candidate.pipeline, candidate.replicas, route)
        if cap is None or limit is None or (excess := max(predicted.peak_bytes) - cap) <= 0:
            return predicted, stages
        limit -= excess
    return _smallest_cut(pieces, candidate, cap, route)


def _smallest_cut(
    pieces: Pieces, candidate: _Candidate, cap: float | None, route: Route
) -> tuple[Predicted, Stages] | None:
    """The candidate cut for the smallest peak, if that is within the cap."""
    part = pieces.scaled(candidate.fraction)
    stage_of, _ = cut_pieces(part, candidate.stages, "memory", candidate.pipeline, None, route)
    stages = part.cut(stage_of, candidate.stages)
    predicted = judge(stages, candidate.pipeline, candidate.replicas, route)
    return (predicted, stages) if cap is None or max(predicted.peak_bytes) <= cap else None


def _small(candidates: list[_Candidate]) -> list[_Candidate]:
    """The candidates that may have the smallest peak: the fewest samples in flight."""
    least = min(c.fraction * c.pipeline.micro_batches for c in candidates)
    finest = min(c.fraction for c in candidates)
    return [
        c
        for c in candidates
        if c.fraction * c.pipeline.micro_batches <= least or (c.pipeline.schedule == "1f1b" and c.fraction <= finest)
    ]


def _refusal(
    pieces: Pieces,
    candidates: list[_Candidate],
    devices: int,
    samples: int,
    schedule: Schedule | None,
    cap: float | None,
    route: Route,
) -> str:
    if cap is None:
        return f"no candidate for {devices} devices could be cut"
    least = _smallest(pieces, candidates, route)
    message = (
        f"{format_bytes(cap)} ({int(cap):,} bytes) per rank cannot be met with {devices} devices: the smallest that "
        f"can is {format_bytes(least)} (memory_bytes={least})"
    )
    most = min(_MOST_STAGES, len(pieces))
    sizes = [n for n in (*range(2, 9), 10, 12, 16, 24, 32, 48, 64) if devices < n <= most]
    for tried in sizes:
        finest = [c for c in _candidates(len(pieces), tried, samples, schedule) if c.stages == tried]
        if schedule is None:
            # Two replicas on the same ranks never hold less than one.
            finest = [c for c in finest if not c.pipeline.paired]
        # A rough cut tells where a careful one is worth the time.
        if finest and _roughly(pieces, finest, route) <= 1.1 * cap and _smallest(pieces, finest, route) <= cap:
            return f"{message}; or use {tried} ranks"
    return f"{message}; more ranks ({sizes[-1]} were tried) do not help" if sizes else message


def _smallest(pieces: Pieces, candidates: list[_Candidate], route: Route) -> int:
    """The smallest peak of the largest rank over all candidates."""
    found = []
    for c in _small(candidates):
        judged = _smallest_cut(pieces, c, None, route)
        found.append(max(judged[0].peak_bytes) if judged else 0)
    return min(found)


def _roughly(pieces: Pieces, candidates: list[_Candidate], route: Route) -> float:
    """The same by quick cuts and closed forms."""
    return min((c.peak_bytes for c in _rank(pieces, _small(candidates), "memory", None, route)), default=float("inf"))


def _why(found: list[tuple[Predicted, _Candidate, Stages]], considered: int) -> tuple[str, ...]:
    best = found[0][0]
    lines = [f"chosen of {considered} candidates: {found[0][1]}: {format_time(best.time_s)}"]
    for predicted, candidate, _ in found[1:6]:
        lines.append(
            f"runner-up: {candidate}: {format_time(predicted.time_s)} ({predicted.time_s / best.time_s:.2f}x), "
            f"peak {format_bytes(max(predicted.peak_bytes))}"
        )
    return tuple(lines)
