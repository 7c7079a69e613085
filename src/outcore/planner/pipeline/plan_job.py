"""How so many devices of a machine train a network in stages; and what is filled in where a caller left it out.

The batch of a step is the job's own; where that is smaller than the number of devices, one sample for each, because one
sample cannot be shared and three of four devices would wait. Links that nobody measured are taken as PCIe's.

Invariant: what the plan predicts is what the timeline of the same plan shows, for the same links.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError, PlanError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine
from outcore.machine.link import Link
from outcore.planner.memory.copy_schedule import tier_of
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.units import Granularity
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.lower import predict_timeline, predicted_by
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.planner.pipeline.search import plan as search_plan
from outcore.program import Links
from outcore.program.plan.document import BatchNorm, Plan

UNKNOWN_LINK = Link.symmetric(bandwidth_bytes_per_s=12e9, latency_s=10e-6)
_LONG = 2000
"""With more micro-batches over all ranks a timeline is not simulated again."""


def plan_stages(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    *,
    devices: int,
    memory_bytes: int,
    schedule: Schedule | None = None,
    balance: Balance | None = None,
    granularity: Granularity = "layer",
    batch_norm: BatchNorm | None = None,
    shared: bool = True,
    beside: LossAndUpdate | None = None,
) -> Plan:
    """Stages, replicas, schedule and micro-batches for a number of devices; the options are those of `outcore.plan`."""
    weights = weights_on(machine, graph, costs, beside)
    made = search_plan(
        graph,
        weights,
        devices=devices,
        memory_bytes=memory_bytes,
        schedule=schedule,
        balance=balance,
        granularity=granularity,
        batch_norm=batch_norm,
        link=machine.between_devices or UNKNOWN_LINK,
        machine=machine.fingerprint,
        shared=shared,
    )
    return _as_shown(made, graph, weights, machine, memory_bytes) if shared else made


def batch_for(job: Job, devices: int) -> int:
    """The batch of a step that was not given: the job's own, or one sample for each device where that is more."""
    return max(job.size, devices)


def plain_peak_bytes(source: Job | Graph, graph: Graph, costs: Costs) -> int:
    """What a plain step of the recorded batch would hold on one device."""
    optimizer = (source.optimizer if isinstance(source, Job) else None) or 2.0
    return memory_curve(graph, costs, optimizer=optimizer).peak_bytes


def weights_on(
    machine: Machine, graph: Graph, costs: Costs | None = None, beside: LossAndUpdate | None = None
) -> CallWeights:
    """The weights of a network's calls on a machine, with the memory below its devices; estimated if not given."""
    costs = costs if costs is not None else batch_costs(graph, machine)
    weights = replace(
        CallWeights.of(graph, costs),
        tier=tier_of(machine),
        parameter_bytes_per_s=machine.devices[0].bandwidth_bytes_per_s,
    )
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
