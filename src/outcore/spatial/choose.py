"""One call from a job to a plan, for any number of devices: `outcore.plan`.

On one device the first rung of the ladder that holds decides (`outcore.stream.one_device`): plain, policies for saved
tensors, tiles. On several, two families compete: stages, schedules and replicas (`outcore.planner.pipeline.plan_job`),
and grids of ranks that share the image, with replicas of the grid where the batch can be divided, with batches in turn
where all of it would not fit, or in front of a pipeline (`outcore.spatial.mixed`). Both are simulated over the same
links with the same costs, and the faster one that is within the memory of a rank is the plan; the other one stands in
it as a runner-up, or as what was refused and why.

Where both take the same time (within a hundredth) the plan is taken that changes least: batch norms over the most
images, then the fewest pieces, then stages, which leave the arithmetic of a layer as it is.

A schedule or a balance that is asked for means stages, and no grid is looked at; nor is one where batch norms are to be
deferred, or the network has no image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.cost.profile import Profile, loss_bytes_of_job, profile
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.part_of_batch import batch_size
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.units import format_bytes, format_time, parse_budget
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.units import Granularity
from outcore.planner.pipeline.batch_norm_images import batch_norms, norms_see, own_norms
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.plan_job import batch_for, links_of, plain_peak_bytes, plan_stages, weights_on
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.program.plan.document import BatchNorm, Plan
from outcore.spatial.mixed import mixed_plans
from outcore.spatial.part_costs import PartCosts
from outcore.spatial.plan import GridChoice, GridSearch, is_over_pixels
from outcore.spatial.tiles.tiled_search import TiledSearch
from outcore.stream.one_device import fit_one_device

__all__ = ["plan"]

_TIE = 1.01
_CAREFUL = 3
"""Grids that are looked at closely."""
_MOST_BATCHES = 64


def plan(
    source: Job | Graph,
    *,
    devices: int | None = None,
    memory: str | int | None = None,
    machine: str | Machine | None = None,
    batch: int | None = None,
    schedule: Schedule | None = None,
    balance: Balance | None = None,
    granularity: Granularity = "layer",
    batch_norm: BatchNorm | None = None,
    costs: Costs | None = None,
    shared: bool = True,
    beside: LossAndUpdate | None = None,
    parts: PartCosts | None = None,
    measure_s: float | None = None,
) -> Plan:
    """Decide how devices train a network: stages, replicas, schedule, micro-batches, or a grid that shares the image;
    on one, what is kept, and tiles.

    >>> import outcore, torch
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))),
    ...     batch=lambda size: (torch.randn(size, 256), torch.randn(size, 256)),
    ...     size=8,
    ... )
    >>> outcore.plan(job, devices=4, memory="1GiB", machine="4xv100").ranks
    4

    Args:
        source: a job, or a graph that was recorded with the batch of one step.
        devices: how many; all of the machine's if not given.
        memory: what no device may exceed, like ``"8GiB"``, or ``"50%"`` of what a plain step with this batch would hold
            on one device; all it has if not given.
        machine: ``"v100x8"``, a machine, or the path of one; this machine if not given.
        batch: samples of a step over all devices; the job's own if not given, at least one for each. Only for a job.
        schedule: the only one to look at: model_parallel, gpipe, 1f1b or gems. The network is then cut into stages.
        balance: what to cut by, "compute" or "memory"; the fastest step if not given.
        granularity: how fine the parts are: "block", "layer" or a depth.
        batch_norm: what batch norms see: "micro_batch", "deferred" or "synchronised" (the whole batch).
        costs: of every call, measured or estimated; estimated for the machine if not given.
        shared: False if every replica is given a batch of the recorded size.
        beside: the loss and the update of a graph's step; those of a job are found.
        parts: what a rank's part of the image takes beyond its share (`outcore.spatial.measure_part`), if measured.
        measure_s: run every call alone, here, for about so many seconds, with the batch and with a part of it, instead
            of estimating. Where ranks share memory and caches, plan in as many processes at the same time.

    Raises:
        PlanError: the memory cannot be met; says the smallest that can.
        MachineError: calls are to be measured on a device that is not here.
    """
    if not isinstance(source, (Job, Graph)):
        raise PlanError(
            f"a plan is made for a job or a graph, not for {type(source).__name__}; "
            "outcore.capture(model, inputs) records a graph, outcore.Job(model=..., batch=...) makes a job"
        )
    where = parse(machine) if isinstance(machine, str) else machine or known()
    count = devices or where.ranks
    size = batch or batch_for(source, count) if isinstance(source, Job) else None
    graph = source.capture(size) if isinstance(source, Job) else source
    if batch_norm in ("deferred", "synchronised") and (own := own_norms(graph)):
        raise PlanError(
            f"batch_norm={batch_norm} is known for torch's own BatchNorm modules; {own[0]} is called by another module "
            "(a Keras model's twin has its own): leave it out, or freeze it"
        )
    alone = count == 1 and schedule is None and balance is None
    if costs is None and (measure_s is not None or not alone):
        costs = batch_costs(graph, where, measure_s=measure_s)
    elif costs is None:
        costs = estimate(graph, where)
    plain = profile(source, where.devices[0], size=size) if alone and isinstance(source, Job) else None
    if isinstance(memory, str):
        whole = None
        if "%" in memory:
            whole = plain.memory.peak_bytes if plain is not None else plain_peak_bytes(source, graph, costs)
        memory = parse_budget(memory, whole)
    limit = memory or where.devices[0].memory_bytes
    if alone:
        return _on_one_device(source, graph, costs, where, limit, size, plain)
    if beside is None and isinstance(source, Job):
        measured = measure_s is not None
        beside = LossAndUpdate.of(source, graph, costs, where, batch or batch_for(source, count), measured=measured)
    stages: Plan | PlanError
    try:
        stages = plan_stages(
            graph,
            costs,
            where,
            devices=count,
            memory_bytes=limit,
            schedule=schedule,
            balance=balance,
            granularity=granularity,
            batch_norm=batch_norm,
            shared=shared,
            beside=beside,
        )
    except PlanError as refused:
        stages = refused
    chosen = stages
    if schedule is None and balance is None and batch_norm != "deferred" and graph.executable is not None:
        over_pixels = is_over_pixels(source, graph)
        search = _Grids(graph, where, costs, count, limit, batch_norm, shared, over_pixels, beside, parts)
        chosen = search.compared(stages)
    if isinstance(chosen, PlanError):
        raise chosen
    if isinstance(source, Job) and batch is None and size is not None and size > source.size:
        said = f"a step trains on {size} samples, one for each device; the job's own batch is {source.size}"
        chosen = replace(chosen, why=(said, *chosen.why))
    return chosen


def _on_one_device(
    source: Job | Graph,
    graph: Graph,
    costs: Costs,
    where: Machine,
    limit: int,
    size: int | None,
    plain: Profile | None,
) -> Plan:
    """What the ladder of one device takes, with the loss counted where a job says it."""
    device = where.devices[0]
    optimizer = OptimizerCost.of(source.update if isinstance(source, Job) else 2.0, device.kind)
    held = None
    if isinstance(source, Job):
        held = loss_bytes_of_job(source, graph, costs, device, optimizer, size=size)
    return fit_one_device(
        graph,
        costs,
        where,
        limit,
        optimizer=optimizer,
        loss_bytes=held,
        plain_s=plain.step.step_s if plain is not None else None,
        plain_bytes=plain.memory.peak_bytes if plain is not None else None,
    ).document()


@dataclass(frozen=True)
class _Row:
    """A grid, and how many replicas of it."""

    least_s: float
    """Of a batch, without reductions and the update."""
    replicas: int
    choice: GridChoice


@dataclass
class _Grids:
    """The grids that may be better than stages."""

    graph: Graph
    where: Machine
    costs: Costs
    devices: int
    limit: int
    batch_norm: BatchNorm | None
    shared: bool
    over_pixels: bool
    """Whether the loss is a sum over pixels, which each rank takes of its part."""
    beside: LossAndUpdate | None = None
    parts: PartCosts | None = None

    def compared(self, stages: Plan | PlanError) -> Plan | PlanError:
        """The better of what stages take and what the best grid takes."""
        weights = weights_on(self.where, self.graph, self.costs, self.beside)
        least_s = sum(w.time_s for w in weights.calls.values()) / self.devices
        if isinstance(stages, Plan) and _per_batch_s(stages, self.shared) < least_s:
            return stages  # no grid computes less than its share
        search = GridSearch(self.graph, weights, links_of(self.where), over_pixels=self.over_pixels, parts=self.parts)
        within_s = _TIE * _per_batch_s(stages, self.shared) if isinstance(stages, Plan) else float("inf")
        found = self._choices(search)
        best, least = None, 0
        for made in self._grids(search, found, within_s):
            peak = _peak_bytes(made)
            if peak > self.limit:
                least = min(least or peak, peak)
            elif best is None or self._key(made) < self._key(best):
                best = made
        if best is not None:
            within_s = min(within_s, _TIE * _per_batch_s(best, self.shared))
        tiles = self._tiles(search)
        for made in tiles.plans(within_s):
            if _per_batch_s(made, self.shared) < within_s:
                made = self._finished(made, batch_size(self.graph))
                best = made if best is None or self._key(made) < self._key(best) else best
        if isinstance(stages, PlanError):
            return self._alone(best, stages, least, tiles.least_bytes)
        stages_s = _per_batch_s(stages, self.shared)
        if best is None:
            return replace(stages, why=(*stages.why, *_too_slow(found[:1], stages_s)))
        taken, other = (best, stages) if self._is_better(best, stages) else (stages, best)
        said = f"chosen: {taken.arrangement}: {format_time(_per_batch_s(taken, self.shared))} for a batch"
        times = _per_batch_s(other, self.shared) / _per_batch_s(taken, self.shared)
        beside = (
            f"runner-up: {other.arrangement}: {format_time(_per_batch_s(other, self.shared))} ({times:.2f}x), "
            f"peak {format_bytes(_peak_bytes(other))}"
        )
        why = (said, beside, *taken.why) if taken is best else (*taken.why, beside)
        return replace(taken, why=why)

    def _alone(self, best: Plan | None, refused: PlanError, least: int, in_tiles: int) -> Plan | PlanError:
        if best is not None:
            return replace(best, why=(f"no stages do: {refused}", *best.why))
        beside = f"; on grids that share the image a rank would hold {format_bytes(least)}" if least else ""
        beside += f"; in the smallest tiles, {format_bytes(in_tiles)}" if in_tiles else ""
        return PlanError(f"{refused}{beside}")

    def _tiles(self, search: GridSearch) -> TiledSearch:
        """The search for grids whose ranks stream; down to one rank for each replica."""
        samples = batch_size(self.graph)
        counts = [n for n in range(1, self.devices + 1) if self.devices % n == 0 and self._divides(samples, n)]
        return TiledSearch(search, self.devices, self.limit, replicas=counts, shared=self.shared)

    def _choices(self, search: GridSearch) -> list[_Row]:
        """Every grid and number of its replicas, the fastest first."""
        found = []
        for replicas in range(1, self.devices):
            if self.devices % replicas or not self._divides(batch_size(self.graph), replicas):
                continue
            for counts in search.grids(self.devices // replicas):
                try:
                    choice = search.choice(counts, 1 / replicas if self.shared else 1.0)
                except PlanError:
                    continue
                found.append(_Row(choice.time_s, replicas, choice))
        return sorted(found, key=lambda row: row.least_s)

    def _grids(self, search: GridSearch, found: list[_Row], within_s: float) -> Iterator[Plan]:
        """Plans that may be faster than stages: grids of all ranks, and grids in front of a pipeline."""
        for row in found[:_CAREFUL]:
            if row.least_s < within_s:
                yield from self._plans(search, row)
        samples = batch_size(self.graph)
        whole = self.batch_norm == "synchronised" and bool(batch_norms(self.graph))
        for made in mixed_plans(search, self.devices, samples, pieces=not whole, within_s=within_s):
            yield self._finished(made, samples)

    def _plans(self, search: GridSearch, row: _Row) -> Iterator[Plan]:
        """The plans of a grid with ever more batches in turn, until one is within the memory."""
        samples = batch_size(self.graph)
        choice = search.improved(row.choice)
        for batches in self._turns(samples // row.replicas if self.shared else samples):
            made = self._finished(search.plan(choice, replicas=row.replicas, batches=batches), samples)
            yield made
            if _peak_bytes(made) <= self.limit:
                return

    def _divides(self, samples: int, replicas: int) -> bool:
        """Whether so many replicas can be: they divide the batch, and no norm is to see more than theirs."""
        if replicas == 1:
            return True
        whole = self.batch_norm == "synchronised" and bool(batch_norms(self.graph))
        return self.shared and samples % replicas == 0 and not whole

    def _turns(self, samples: int) -> Iterator[int]:
        """Into how many batches in turn the samples of a replica can be cut, the fewest first."""
        if self.batch_norm == "synchronised" and batch_norms(self.graph):
            return iter((1,))
        return itertools.islice((n for n in range(1, samples + 1) if samples % n == 0), _MOST_BATCHES)

    def _finished(self, made: Plan, samples: int) -> Plan:
        made = replace(
            made,
            machine=self.where.fingerprint,
            memory_bytes=self.limit,
            batch_norm=self.batch_norm or "micro_batch" if made.replicas == 1 else "micro_batch",
        )
        said = norms_see(made, self.graph, samples)
        return replace(made, why=(*([said] if said else []), *made.why))

    def _key(self, made: Plan) -> tuple[float, ...]:
        return _per_batch_s(made, self.shared), *_change(made, self.graph)

    def _is_better(self, grid: Plan, stages: Plan) -> bool:
        one, other = _per_batch_s(grid, self.shared), _per_batch_s(stages, self.shared)
        if max(one, other) > _TIE * min(one, other):
            return one < other
        return _change(grid, self.graph) < _change(stages, self.graph)


def _too_slow(found: Sequence[_Row], stages_s: float) -> list[str]:
    """A line about a grid that was not looked at any closer."""
    lines = []
    for row in found:
        copies = f" x {row.replicas} replicas" if row.replicas > 1 else ""
        times = f"at least {format_time(row.least_s)} ({row.least_s / stages_s:.2f}x)"
        lines += [f"runner-up: image over {row.choice.layout.grid} ranks{copies}: {times}"]
    return lines


def _change(made: Plan, graph: Graph) -> tuple[float, ...]:
    """How much a plan changes: the part of the batch that norms do not see, pieces, and the arithmetic of layers."""
    pieces = made.micro_batches * made.batches
    unseen = 1 - 1 / (pieces * made.replicas) if batch_norms(graph) and made.batch_norm == "micro_batch" else 0.0
    return unseen, pieces, made.parts > 1 or "tile" in (made.spatial or {})


def _per_batch_s(made: Plan, shared: bool) -> float:
    assert made.predicted is not None
    return made.predicted.time_s / (1 if shared else made.replicas)


def _peak_bytes(made: Plan) -> int:
    assert made.predicted is not None
    return max(made.predicted.peak_bytes)
