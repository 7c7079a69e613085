"""From a plan to the program that runs it, and to the timeline that is expected of it.

A candidate's time and peak are found in the same way. Closed forms rank hundreds of candidates; the few best are
compiled and simulated, and what stands in the plan as predicted is what the simulator found, with all replicas in it: a
rank that waits for an all-reduce waits, here and in the timeline that is shown. A program of very many pieces repeats
itself: two shorter ones of a single replica are simulated, with the time of the all-reduce over all replicas added to
its step, and the time of one more piece is extrapolated.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner.partition.partition import split_by_hand
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink
from outcore.planner.pipeline.stage_policies import StagePlanner
from outcore.program import Links, Program, Stages, Timeline, check, compile_program, simulate
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.written_order import program_in_order


def lower(plan: Plan, graph: Graph, weights: CallWeights) -> tuple[Program, Stages]:
    """The program of a plan, checked, and the stages it runs."""
    plan.validate(graph)
    pipeline = Pipeline(plan.schedule, plan.micro_batches, plan.batches)
    fraction = 1 / (plan.replicas * pipeline.pieces)
    stages = split_by_hand(graph, weights, plan.stages, pipeline=pipeline, fraction=fraction).stages
    if plan.policy and weights.costs is not None and StagePlanner.can(graph, weights.costs):
        stages = StagePlanner(graph, weights.costs, tier=weights.tier).under(stages, plan.policy, fraction)
    if plan.order:
        inverted = plan.schedule == "gems"
        program = program_in_order(stages, plan.order, inverted=inverted, replicas=plan.replicas)
    else:
        program = compile_program(
            stages,
            SCHEDULE_NAMES[plan.schedule],
            micro_batches=plan.micro_batches,
            batches=plan.batches,
            replicas=plan.replicas,
            placement=plan.placement,
        )
    check(program, stages)
    return program, stages


def predict_timeline(plan: Plan, graph: Graph, weights: CallWeights, links: Links) -> Timeline:
    """The predicted timeline of a step of the plan."""
    if plan.spatial is not None:
        raise PlanError("a plan with a grid has more ranks than stages; ask outcore.spatial.timeline for its timeline")
    program, stages = lower(plan, graph, weights)
    return replace(simulate(program, stages, links), name=plan.arrangement)


def predicted_by(timeline: Timeline, plan: Plan) -> Plan:
    """The plan with the figures of its timeline, so that both say the same."""
    peaks = timeline.peak_bytes[: plan.ranks_per_replica]
    return replace(plan, predicted=PredictedStep(timeline.step_s, peaks, timeline.bubble, "simulated"))


SCHEDULE_NAMES = {"model_parallel": "model-parallel", "gpipe": "gpipe", "1f1b": "1f1b", "gems": "gems-master"}
_LARGEST = 3_000
"""A program with more forwards is extrapolated from shorter ones."""


def simulate_candidate(stages: Stages, pipeline: Pipeline, replicas: int, route: RankLink) -> PredictedStep:
    """Time, peak per rank of a replica, and bubble."""
    if replicas * len(stages) * pipeline.pieces <= _LARGEST:
        timeline = _timeline(stages, pipeline, route, replicas)
        return PredictedStep(timeline.step_s, timeline.peak_bytes[: len(stages)], timeline.bubble, "simulated")
    stages = _with_rings(stages, pipeline, replicas, route)
    number = pipeline.batches if pipeline.batches > 1 else pipeline.micro_batches
    # Batches in turn repeat at once, micro-batches when the pipeline has filled.
    settled = 6 if pipeline.batches > 1 else 2 * len(stages) + 4
    enough = max(settled, _LARGEST * number // (len(stages) * pipeline.pieces))
    enough -= (number - enough) % 2  # under GEMS, an odd number ends on the other replica
    if enough >= number or len(stages) * pipeline.pieces <= _LARGEST:
        timeline = _timeline(stages, pipeline, route)
        return PredictedStep(timeline.step_s, timeline.peak_bytes, timeline.bubble, "simulated")
    span = 2 * max(1, enough // 8)
    one = _timeline(stages, _shortened(pipeline, enough - span), route)
    two = _timeline(stages, _shortened(pipeline, enough), route)

    def counted_on(first: float, second: float) -> float:
        return second + (second - first) / span * (number - enough)

    time_s = counted_on(one.step_s, two.step_s)
    busy_s = counted_on(one.step_s * (1 - one.bubble), two.step_s * (1 - two.bubble))
    peaks = tuple(ceil(counted_on(a, b)) for a, b in zip(one.peak_bytes, two.peak_bytes, strict=True))
    return PredictedStep(time_s, peaks, 1 - busy_s / time_s, f"simulated for {enough} of {number} passes")


def _shortened(pipeline: Pipeline, number: int) -> Pipeline:
    return replace(pipeline, batches=number) if pipeline.batches > 1 else replace(pipeline, micro_batches=number)


def _timeline(stages: Stages, pipeline: Pipeline, route: RankLink, replicas: int = 1) -> Timeline:
    program = compile_program(
        stages,
        SCHEDULE_NAMES[pipeline.schedule],
        micro_batches=pipeline.micro_batches,
        batches=pipeline.batches,
        replicas=replicas,
    )
    return simulate(program, stages, Links(route.link))


def _with_rings(stages: Stages, pipeline: Pipeline, replicas: int, route: RankLink) -> Stages:
    """The stages of one replica, whose steps include the extra time of the all-reduces over all replicas."""
    if replicas == 1:
        return stages
    rows = []
    for k, stage in enumerate(stages.stages):
        inside = 2 if pipeline.paired and pipeline.batches > 1 and 2 * k + 1 != len(stages) else 1
        longer = _ring_s(stage.gradient_bytes, inside * replicas, route) - _ring_s(stage.gradient_bytes, inside, route)
        rows.append(replace(stage, optimizer_s=stage.optimizer_s + (longer if stage.trains else 0.0)))
    return Stages(tuple(rows), stages.edges, stages.ties)


def _ring_s(nbytes: int, size: int, route: RankLink) -> float:
    return 2 * (size - 1) * route.time_s(nbytes / size)
