"""From a plan to the program that runs it, and to the timeline that is expected of it."""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner.partition.partition import split_by_hand
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.schedule_model import Pipeline
from outcore.planner.pipeline.simulate_candidate import SCHEDULE_NAMES
from outcore.planner.pipeline.stage_policies import StagePlanner
from outcore.program import Links, Program, Stages, Timeline, check, compile_program, simulate
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.written_order import program_in_order

__all__ = ["lower", "predict_timeline", "predicted_by"]


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
