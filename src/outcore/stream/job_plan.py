"""One call from a job to a plan, for any number of devices: `outcore.plan`.

On one device the answer is the first rung of the ladder that holds (`outcore.stream.one_device`): plain, policies for
saved tensors, tiles. On several it is the search over stages, schedules and replicas
(`outcore.planner.pipeline.plan_job`). What is left out is filled in as there.
"""

from __future__ import annotations

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.cost.profile import loss_bytes_of_job
from outcore.cost.profile import profile as make_profile
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.units import parse_budget
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.units import Granularity
from outcore.planner.pipeline.plan_job import batch_for, plain_peak_bytes
from outcore.planner.pipeline.plan_job import plan as plan_many
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.program.plan.document import BatchNorm, Plan
from outcore.stream.one_device import fit_one_device

__all__ = ["plan"]


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
) -> Plan:
    """Decide how devices train a network: stages, replicas, schedule, micro-batches; on one, what is kept, and tiles.

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

    Raises:
        PlanError: the memory cannot be met; says the smallest that can.
    """
    where = parse(machine) if isinstance(machine, str) else machine or known()
    count = devices or where.ranks
    if count == 1 and schedule is None and balance is None:
        size = batch or batch_for(source, 1) if isinstance(source, Job) else None
        graph = source.capture(size) if isinstance(source, Job) else source
        state = (source.optimizer if isinstance(source, Job) else None) or 2.0
        optimizer = OptimizerCost.of(state, where.devices[0].kind)
        known_costs = costs if costs is not None else estimate(graph, where)
        held, plain = None, None
        if isinstance(source, Job):
            plain = make_profile(source, where.devices[0], size=size)
            held = loss_bytes_of_job(source, graph, known_costs, where.devices[0], optimizer, size=size)
        if isinstance(memory, str):
            whole = plain.memory.peak_bytes if plain is not None else plain_peak_bytes(graph, graph, known_costs)
            memory = parse_budget(memory, whole)
        limit = memory or where.devices[0].memory_bytes
        return fit_one_device(
            graph,
            known_costs,
            where,
            limit,
            optimizer=optimizer,
            loss_bytes=held,
            plain_s=plain.step.step_s if plain is not None else None,
            plain_bytes=plain.memory.peak_bytes if plain is not None else None,
        ).document()
    return plan_many(
        source,
        devices=count,
        memory=memory,
        machine=where,
        batch=batch,
        schedule=schedule,
        balance=balance,
        granularity=granularity,
        batch_norm=batch_norm,
        costs=costs,
        shared=shared,
    )
