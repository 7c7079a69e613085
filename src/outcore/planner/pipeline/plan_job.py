"""One call from a job to a plan: record it, estimate it, and decide how so many devices train it.

    plan = outcore.plan(job, devices=4, memory="8GiB")

The parts (weights, links, the search) stay available to callers that have measured them; this call fills in what was
left out and says in the plan what it chose. What is left out and chosen here:

batch    The job's own; where that is smaller than the number of devices, one sample for each, because one sample cannot
         be shared and three of four devices would wait.
memory   All that a device of the machine has.
machine  This one.

Invariant: what the plan predicts is what the timeline of the same plan shows, for the same links.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError, PlanError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.link import Link
from outcore.machine.units import parse_budget
from outcore.planner.memory.machine_tier import tier_of
from outcore.planner.memory.plan import plan_memory
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.units import Granularity
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.lower import predict_timeline, predicted_by
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.planner.pipeline.search import plan as search_plan
from outcore.program import Links
from outcore.program.plan.document import BatchNorm, Plan

__all__ = ["batch_for", "links_of", "plain_peak_bytes", "plan", "weights_on"]

UNKNOWN_LINK = Link.symmetric(bandwidth_bytes_per_s=12e9, latency_s=10e-6)
_LONG = 2000
"""With more micro-batches over all ranks a timeline is not simulated again."""


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
    costs: Any = None,
    shared: bool = True,
    beside: LossAndUpdate | None = None,
) -> Plan:
    """Decide how devices train a network: stages, replicas, schedule, micro-batches; on one device, what is kept.

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
        batch: samples of a step over all devices; see `batch_for` if not given. Only for a job.
        schedule: the only one to look at: model_parallel, gpipe, 1f1b or gems. The network is then cut into stages.
        balance: what to cut by, "compute" or "memory"; the fastest step if not given.
        granularity: how fine the parts are: "block", "layer" or a depth.
        batch_norm: what batch norms see: "micro_batch", "deferred" or "synchronised" (the whole batch).
        costs: of every call, measured or estimated; estimated for the machine if not given.
        shared: False if every replica is given a batch of the recorded size.
        beside: the loss and the update of a graph's step; those of a job are found.

    Raises:
        PlanError: the memory cannot be met; says the smallest that can.
    """
    where = parse(machine) if isinstance(machine, str) else machine or known()
    count = devices or where.ranks
    graph = source.capture(batch or batch_for(source, count)) if isinstance(source, Job) else source
    costs = costs if costs is not None else estimate(graph, where)
    if isinstance(memory, str):
        plain = plain_peak_bytes(source, graph, costs) if "%" in memory else None
        memory = parse_budget(memory, plain)
    limit = memory or where.devices[0].memory_bytes
    if count == 1 and schedule is None and balance is None:
        optimizer = OptimizerCost.of(_optimizer(source), where.devices[0].kind)
        rate = where.devices[0].bandwidth_bytes_per_s
        return plan_memory(
            graph, costs, budget_bytes=limit, optimizer=optimizer, tier=tier_of(where), memory_bytes_per_s=rate
        ).document()
    if beside is None and isinstance(source, Job):
        beside = LossAndUpdate.of(source, graph, costs, where, batch or batch_for(source, count))
    weights = weights_on(where, graph, costs, beside)
    made = search_plan(
        graph,
        weights,
        devices=count,
        memory_bytes=limit,
        schedule=schedule,
        balance=balance,
        granularity=granularity,
        batch_norm=batch_norm,
        link=where.between_devices or UNKNOWN_LINK,
        machine=where.fingerprint,
        shared=shared,
    )
    chosen = batch_for(source, count) if isinstance(source, Job) and batch is None else 0
    if isinstance(source, Job) and chosen > source.size:
        said = f"a step trains on {chosen} samples, one for each device; the job's own batch is {source.size}"
        made = replace(made, why=(said, *made.why))
    return _as_shown(made, graph, weights, where, limit) if shared else made


def batch_for(job: Job, devices: int) -> int:
    """The batch of a step that was not given: the job's own, or one sample for each device where that is more."""
    return max(job.size, devices)


def plain_peak_bytes(source: Job | Graph, graph: Graph, costs: Any) -> int:
    """What a plain step of the recorded batch would hold on one device."""
    return memory_curve(graph, costs, optimizer=_optimizer(source)).peak_bytes


def weights_on(machine: Machine, graph: Graph, costs: Any = None, beside: LossAndUpdate | None = None) -> CallWeights:
    """The weights of a network's calls on a machine, with the memory below its devices; estimated if not given."""
    costs = costs if costs is not None else estimate(graph, machine)
    weights = replace(CallWeights.of(graph, costs), tier=tier_of(machine))
    return weights if beside is None else beside.added(weights, graph)


def links_of(machine: Machine) -> Links:
    """The links of a machine; unmeasured ones between devices are taken as PCIe's."""
    try:
        found = Links.of(machine)
    except OutcoreError:
        return Links(UNKNOWN_LINK)
    return found if found.between_devices else Links(UNKNOWN_LINK)


def _as_shown(made: Plan, graph: Graph, weights: CallWeights, where: Machine, limit: int) -> Plan:
    """The plan with the figures of the timeline over the machine's own links, unless those break the budget."""
    if made.ranks * made.micro_batches * made.batches > _LONG:
        return made
    shown = predicted_by(predict_timeline(made, graph, weights, links_of(where)), made)
    assert shown.predicted is not None
    if max(shown.predicted.peak_bytes) > limit:
        raise PlanError(
            f"over the links of {where.name} the plan holds {max(shown.predicted.peak_bytes):,} bytes, more than the "
            f"{limit:,} asked for; ask for that much"
        )
    return shown


def _optimizer(source: Job | Graph) -> Any:
    return (source.optimizer if isinstance(source, Job) else None) or 2.0
