"""From a graph, its weights and a number of devices to a plan.

Every way to share the devices (stages x replicas), every schedule and every number of micro-batches that divides the
batch is a candidate (`outcore.planner.pipeline.candidates`). Most are ruled out by what they would take if cut evenly;
the rest is cut roughly and ranked by closed forms. The best of them are cut with full effort, compiled and simulated,
and the fastest that stays within the memory of a rank becomes the plan, with the others as runners-up. Where the
fastest cuts hold too much, the memory planner is asked what their stages need not keep
(`outcore.planner.pipeline.stage_policies`), and they compete under these policies. The best few are also tried in
orders that no schedule has a name for (`outcore.planner.pipeline.order_search`).

Where predictions are the same (within a hundredth: they are no better than that) the plan that changes least is taken:
batch norms over the most images, then the fewest pieces, then the fewest stages. A network that waits for itself
anyway, one batch through all stages, is cut evenly.

Cuts are looked for between units as fine as asked, and again between coarser ones: blocks are where little crosses, and
a program that sees fewer places sees farther. Both are simulated.

The batch a step trains on is the one the graph was recorded with, whatever the plan: pieces of it go through the
pipeline together (GPipe, 1F1B) or one after the other (model parallelism, GEMS), on all replicas at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.part_of_batch import batch_size
from outcore.machine.link import Link
from outcore.machine.units import format_bytes, format_time
from outcore.planner.partition.strategies import Balance, cut_pieces
from outcore.planner.partition.units import Granularity, find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh
from outcore.planner.pipeline.batch_norm_images import batch_norms, norms_see
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.candidates import Candidate, EvenCut, RoughCut, candidates_for
from outcore.planner.pipeline.lower import simulate_candidate
from outcore.planner.pipeline.order_search import best_order
from outcore.planner.pipeline.schedule_model import RankLink, Schedule
from outcore.planner.pipeline.stage_policies import StagePlanner, described
from outcore.program.plan.document import BatchNorm, Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.policies import parse_policies, policies_to_json
from outcore.program.stages import Stages

_SIMULATED = 4
_FINALISTS = 7
_CAREFUL = 3
_REORDERED = 3
_COARSE_UNITS = 160
_TRIES = 3
_TIE = 1.01
_EVEN = 1.25
"""A step of even stages may take so many times as long where stages wait for each other in any case."""

Tied = Literal["together", "copies"]
SimulatedCandidate = tuple[PredictedStep, Candidate, Stages]


def plan(
    graph: Graph,
    weights: CallWeights,
    *,
    devices: int,
    memory_bytes: int | None = None,
    balance: Balance | None = None,
    schedule: Schedule | None = None,
    link: Link | RankLink | None = None,
    granularity: Granularity = "layer",
    tied: Tied | None = None,
    machine: str | None = None,
    batch_norm: BatchNorm | None = None,
    shared: bool = True,
    policies: bool = True,
) -> Plan:
    """The fastest plan for a network on so many devices.

    Args:
        graph: the network, recorded with the batch of one step.
        weights: of its calls.
        devices: all of them are used.
        memory_bytes: what no rank may exceed.
        balance: "compute" or "memory" to cut by; the fastest step if not given.
        schedule: the only one to look at.
        link: between ranks; 12 GB/s if not given.
        granularity: how fine the parts are.
        tied: whether calls that share a parameter stay together, or may be on several ranks, each with a copy; the
            faster of both if not given. A language model whose head is its embedding has one at each end.
        machine: fingerprint to note in the plan.
        batch_norm: what batch norms are to see; "synchronised" for the whole batch, each micro-batch if not given.
        shared: whether replicas divide the batch among them, or each is given one of its own.
        policies: whether stages may recompute, encode or offload what they would keep, where the weights have the costs
            that this is planned with.

    Raises:
        PlanError: the memory cannot be met; says the smallest that can, and how many ranks would do.
    """
    if devices < 1:
        raise PlanError(f"a plan needs at least 1 device, not {devices}")
    if tied is None:
        ways: tuple[Tied, ...] = ("together", "copies") if weights.tied and devices > 1 else ("together",)
        planned = partial(
            plan,
            graph,
            weights,
            devices=devices,
            memory_bytes=memory_bytes,
            balance=balance,
            schedule=schedule,
            link=link,
            granularity=granularity,
            machine=machine,
            batch_norm=batch_norm,
            shared=shared,
            policies=policies,
        )
        return _fastest([partial(planned, tied=way) for way in ways], shared)
    route = RankLink.of(link) if isinstance(link, Link) else link or RankLink()
    samples = batch_size(graph)
    normed = bool(batch_norms(graph))
    levels = _levels(graph, weights, granularity, tied)
    whole = normed and batch_norm == "synchronised"
    search = PlanSearch(levels, samples, schedule, balance or "search", route, normed and not whole, whole, shared)
    candidates = search.candidates(devices)
    if not candidates:
        norms = " and batch norms that see all of it" if whole else ""
        raise PlanError(
            f"{devices} devices cannot share {len(search.finest)} units and a batch of {samples} under "
            f"{schedule or 'any'} schedule{norms}; use fewer devices, a larger batch or a finer granularity"
        )
    found = search.simulated(candidates, memory_bytes)
    if not found and memory_bytes is not None:
        found = [j for j in search.smallest(devices) if max(j[0].peak_bytes) <= memory_bytes]
    planner = None
    if policies and memory_bytes is not None and StagePlanner.can(graph, weights.costs):
        assert weights.costs is not None
        planner = StagePlanner(graph, weights.costs, tier=weights.tier)
        found = found + search.with_policies(planner, candidates, memory_bytes, devices, found)
    if not found:
        from outcore.planner.pipeline.infeasible import refusal

        raise PlanError(refusal(search, devices, memory_bytes, planner))
    found = search.in_order(found + search.reordered(found, memory_bytes))
    predicted, best, stages = found[0]
    copies = _copies(weights, stages)
    made = Plan(
        graph.fingerprint,
        name_stages(graph, [s.calls for s in stages.stages]),
        best.pipeline.schedule,
        best.pipeline.micro_batches,
        best.pipeline.batches,
        best.replicas,
        order=best.order,
        policy=dict(best.policy),
        exactness="bitwise" if best.replicas == 1 and not best.pipeline.paired and not copies else "reassociated",
        batch_norm=batch_norm or "micro_batch",
        tied=copies,
        machine=machine,
        memory_bytes=memory_bytes,
        predicted=predicted,
    )
    said = norms_see(made, graph, samples * best.batches_trained)
    inside = described(parse_policies(made.policy), stages)
    return replace(made, why=(*([said] if said else []), *inside, *_why(found, len(candidates))))


def _fastest(ways: Sequence[Callable[[], Plan]], shared: bool) -> Plan:
    """The plan of several that is the fastest per batch; of two that take the same time, one without copies."""
    made: list[Plan] = []
    refused: list[PlanError] = []
    for way in ways:
        try:
            made.append(way())
        except PlanError as error:
            refused.append(error)
    if not made:
        raise min(refused, key=lambda error: getattr(error, "least_bytes", None) or math.inf)

    def time_per_batch_s(found: Plan) -> float:
        assert found.predicted is not None
        return found.predicted.time_s / (1 if shared else found.replicas)

    return min(made, key=lambda found: time_per_batch_s(found) * (_TIE if found.tied else 1.0))


@dataclass
class PlanSearch:
    """One network, at several levels of detail, and the constraints on its plan."""

    levels: Sequence[WeightedUnits]
    """The finest first."""
    samples: int
    schedule: Schedule | None
    balance: Balance
    route: RankLink
    normed: bool = False
    """Whether it has norms that see only the piece they are given."""
    whole: bool = False
    """Whether norms must see the whole batch."""
    shared: bool = True
    """Whether replicas divide the batch among them."""

    def __post_init__(self) -> None:
        self._parts: dict[tuple[int, tuple[float, int]], WeightedUnits] = {}
        self._quick: dict[tuple[float, int], RoughCut] = {}
        self._ideals: dict[tuple[float, int], EvenCut] = {}
        self._smallest: dict[int, list[SimulatedCandidate]] = {}

    @property
    def finest(self) -> WeightedUnits:
        """The units of the finest division that a partition may use."""
        return self.levels[0]

    def candidates(self, devices: int) -> list[Candidate]:
        """Every way to share so many devices."""
        found = candidates_for(len(self.finest), devices, self.samples, self.schedule, shared=self.shared)
        if self.whole:
            found = [c for c in found if c.pipeline.pieces == 1]
        return found

    def change(self, candidate: Candidate) -> tuple[float, int, bool, int]:
        """How much a candidate changes, to compare by: what norms do not see, the pieces of a batch, their order,
        stages."""
        pieces = candidate.pipeline.pieces
        return -candidate.fraction if self.normed else 0.0, pieces, bool(candidate.order), candidate.stages

    def in_order(self, found: Sequence[SimulatedCandidate]) -> list[SimulatedCandidate]:
        """The fastest first, per batch; of those that take the same time, the one that changes least."""

        def time_per_batch_s(row: SimulatedCandidate) -> float:
            return row[0].time_s / row[1].batches_trained

        best = min(map(time_per_batch_s, found))
        tied = sorted(
            (j for j in found if time_per_batch_s(j) <= _TIE * best),
            key=lambda j: (self.change(j[1]), time_per_batch_s(j)),
        )
        return tied + sorted((j for j in found if time_per_batch_s(j) > _TIE * best), key=time_per_batch_s)

    def part(self, level: int, candidate: Candidate) -> WeightedUnits:
        """The units of a level for the part of the batch that a candidate takes at a time."""
        if (key := (level, candidate.part)) not in self._parts:
            self._parts[key] = self.levels[level].scaled(*candidate.part)
        return self._parts[key]

    def ideal(self, candidate: Candidate) -> EvenCut:
        """The lower bounds of even cuts."""
        if candidate.part not in self._ideals:
            self._ideals[candidate.part] = EvenCut.of(self.part(0, candidate))
        return self._ideals[candidate.part]

    def ranked(self, candidates: Sequence[Candidate], balance: Balance, cap: float | None) -> list[Candidate]:
        """The candidates for which a rough cut fits, the fastest first; those that cannot be among them are not cut."""
        found = []
        bounds = {c: self.ideal(c).time_s(c, self.route) / c.batches_trained for c in candidates}
        best: dict[str, float] = {}
        for c in sorted(candidates, key=bounds.__getitem__):
            name = c.pipeline.schedule
            if bounds[c] > 1.2 * best.get(name, float("inf")) or (
                cap is not None and self.ideal(c).peak_bytes(c) > cap
            ):
                continue
            if (rough := self.rough(c, balance, cap)) is not None:
                found.append(rough)
                best[name] = min(rough.time_s / c.batches_trained, best.get(name, float("inf")))
        if not found:
            return []
        fastest = min(c.time_s / c.batches_trained for c in found)
        return sorted(found, key=lambda c: self._rank(c, fastest))

    def _rank(self, candidate: Candidate, fastest: float) -> tuple[float, ...]:
        time_per_batch_s = candidate.time_s / candidate.batches_trained
        return max(time_per_batch_s, _TIE * fastest), *self.change(candidate), time_per_batch_s, candidate.peak_bytes

    def rough(self, candidate: Candidate, balance: Balance, cap: float | None) -> Candidate | None:
        """The candidate with the figures of a rough cut."""
        if candidate.part not in self._quick:
            self._quick[candidate.part] = RoughCut(self.part(0, candidate))
        quick = self._quick[candidate.part]
        figures = quick.cut(candidate.stages, balance, candidate.pipeline, cap, self.route, candidate.replicas)
        return None if figures is None else replace(candidate, time_s=figures[0], peak_bytes=figures[1])

    def simulated(self, candidates: Sequence[Candidate], cap: float | None) -> list[SimulatedCandidate]:
        """The best candidates, cut with full effort and simulated, as far as they are within the cap."""
        coarsest = len(self.levels) - 1
        finalists = _finalists(self.ranked(candidates, self.balance, cap))
        found = {c: self._fitting(c, coarsest, cap) for c in finalists}
        # The finest level costs most, so only those that may win are cut there; what did not fit may fit there.
        times = {c: (c.time_s if (j := found[c]) is None else j[0].time_s) / c.batches_trained for c in finalists}
        for candidate in sorted(finalists, key=times.__getitem__)[: _CAREFUL if coarsest else 0]:
            fine = self._fitting(candidate, 0, cap)
            coarse = found[candidate]
            if fine is not None and (coarse is None or fine[0].time_s < coarse[0].time_s):
                found[candidate] = fine
        return [j for j in found.values() if j is not None]

    def reordered(self, found: Sequence[SimulatedCandidate], cap: float | None) -> list[SimulatedCandidate]:
        """The best few of those that were cut and simulated, in orders that no schedule has a name for."""
        made: dict[tuple[int, int, int], SimulatedCandidate] = {}
        for _, candidate, stages in self.in_order(found) if self.schedule is None else ():
            key = candidate.stages, candidate.replicas, candidate.pipeline.pieces
            if len(made) == _REORDERED or key in made:
                continue
            if (better := best_order(stages, candidate, cap, self.route)) is not None:
                made[key] = *better, stages
        return list(made.values())

    def with_policies(
        self,
        planner: StagePlanner,
        candidates: Sequence[Candidate],
        cap: int,
        devices: int,
        found: Sequence[SimulatedCandidate],
    ) -> list[SimulatedCandidate]:
        """Cuts that hold too much as they are and are faster than those that fit, with policies inside their stages."""
        if found and all(c.peak_bytes <= cap for c in self.ranked(candidates, self.balance, None)[:_SIMULATED]):
            return []
        best_s = min((j[0].time_s / j[1].batches_trained for j in found), default=float("inf"))
        tried = self.in_order(self.simulated(candidates, None) or self.smallest(devices))
        tried = [j for j in tried if max(j[0].peak_bytes) > cap][:_CAREFUL]
        made = []
        for predicted, candidate, stages in tried if found else [*tried, *self.smallest(devices)]:
            if predicted.time_s / candidate.batches_trained >= best_s:
                continue
            if (fitted := self.fitted(planner, candidate, stages, cap)) is not None:
                made.append(fitted)
        return made

    def fitted(
        self, planner: StagePlanner, candidate: Candidate, stages: Stages, cap: float
    ) -> SimulatedCandidate | None:
        """A cut with policies under which it was simulated to stay within a cap."""
        fitted = planner.fitted(stages, candidate.pipeline, candidate.fraction, cap)
        if fitted is None:
            return None
        under = simulate_candidate(fitted[0], candidate.pipeline, candidate.replicas, self.route)
        if max(under.peak_bytes) > cap:
            return None
        return under, replace(candidate, policy=tuple(policies_to_json(fitted[1]).items())), fitted[0]

    def smallest(self, devices: int) -> list[SimulatedCandidate]:
        """The candidates with the smallest peaks, cut for that and simulated."""
        if devices not in self._smallest:
            self._smallest[devices] = self._find_smallest(self.candidates(devices))
        return self._smallest[devices]

    def _find_smallest(self, candidates: Sequence[Candidate]) -> list[SimulatedCandidate]:
        rough = [r for c in fewest_in_flight(candidates) if (r := self.rough(c, "memory", None)) is not None]
        rough.sort(key=lambda c: (c.peak_bytes, c.time_s))
        found = []
        for candidate in rough[:2]:
            cuts = (self._cut(candidate, level, "memory", None) for level in range(len(self.levels)))
            found += [simulated for simulated in cuts if simulated is not None]
        return found

    def _fitting(self, candidate: Candidate, level: int, cap: float | None) -> SimulatedCandidate | None:
        """The candidate cut and simulated; cut again under a lower cap while the simulator finds too much."""
        limit = cap
        for _ in range(_TRIES):
            simulated = self._cut(candidate, level, self.balance, limit)
            if simulated is None or cap is None or limit is None:
                return simulated
            if (excess := max(simulated[0].peak_bytes) - cap) <= 0:
                return simulated
            limit -= excess
        smallest = self._cut(candidate, level, "memory", None)
        return smallest if smallest is not None and cap is not None and max(smallest[0].peak_bytes) <= cap else None

    def _cut(self, candidate: Candidate, level: int, balance: Balance, cap: float | None) -> SimulatedCandidate | None:
        part = self.part(level, candidate)
        if len(part) < candidate.stages:
            return None
        try:
            stage_of, _ = cut_pieces(part, candidate.stages, balance, candidate.pipeline, cap, self.route)
        except PlanError:
            return None
        stages = part.cut(stage_of, candidate.stages)
        found = simulate_candidate(stages, candidate.pipeline, candidate.replicas, self.route)
        if balance == "search" and candidate.pipeline.schedule == "model_parallel" and candidate.stages > 1:
            # One rank works at a time, so hardly any cut is slower than another: take even stages.
            even = self._cut(candidate, level, "compute", cap)
            if even is not None and even[0].time_s <= _EVEN * found.time_s:
                return even
        return found, candidate, stages


def fewest_in_flight(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that may have the smallest peak: the fewest samples in flight."""
    least = min(c.in_flight for c in candidates)
    return [c for c in candidates if c.in_flight <= least]


def _levels(graph: Graph, weights: CallWeights, granularity: Granularity, tied: Tied) -> list[WeightedUnits]:
    """The network at the granularity asked for, and at the finest coarser one that is much smaller."""
    finest = find_units(graph, weights, granularity, tied)
    levels = [finest]
    top = granularity if isinstance(granularity, int) else 1 if granularity == "block" else 8
    for depth in range(top - (granularity != "layer"), 0, -1):
        if len(graph.view(depth).boxes) <= min(_COARSE_UNITS, 2 * len(finest) // 3):
            coarser = find_units(graph, weights, depth, tied)
            if 1 < len(coarser) < len(finest):
                levels.append(coarser)
            break
    return [weigh(graph, weights, units) for units in levels]


def _finalists(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best few, with the best of every schedule, the smallest, and the best of other depths that come close."""
    chosen = dict.fromkeys(ranked[:_SIMULATED])
    schedules: set[str] = set()
    depths: set[int] = set()
    for candidate in ranked:
        if candidate.pipeline.schedule not in schedules:
            schedules.add(candidate.pipeline.schedule)
            chosen[candidate] = None
    if ranked:
        chosen[min(ranked, key=lambda c: c.peak_bytes)] = None
    for candidate in ranked:
        close = candidate.time_s <= 1.3 * ranked[0].time_s and len(chosen) < _FINALISTS
        if candidate.stages not in depths and close:
            chosen[candidate] = None
        depths.add(candidate.stages)
    return list(chosen)


def _copies(weights: CallWeights, stages: Stages) -> dict[str, tuple[int, ...]]:
    placed = {call: k for k, stage in enumerate(stages.stages) for call in stage.calls}
    places = {name: tuple(sorted({placed[c] for c in users})) for name, users in weights.tied.items()}
    return {name: found for name, found in places.items() if len(found) > 1}


def _why(found: Sequence[SimulatedCandidate], considered: int) -> tuple[str, ...]:
    best = found[0][0]
    lines = [f"chosen of {considered} candidates: {found[0][1]}: {format_time(best.time_s)}"]
    for predicted, candidate, _ in found[1:6]:
        lines.append(
            f"runner-up: {candidate}: {format_time(predicted.time_s)} ({predicted.time_s / best.time_s:.2f}x), "
            f"peak {format_bytes(max(predicted.peak_bytes))}"
        )
    return tuple(lines)
