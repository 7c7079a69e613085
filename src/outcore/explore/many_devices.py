"""The plan for several devices: stages, schedule and replicas, with its timeline, for the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outcore.cost.fixed_times import batch_costs
from outcore.errors import OutcoreError
from outcore.explore.plan_points import timeline_json
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine
from outcore.planner import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.plan_job import batch_for, links_of, weights_on
from outcore.program.plan.document import Plan
from outcore.spatial.choose import plan as make_plan
from outcore.spatial.timeline import predict_timeline

__all__ = ["pipeline_json", "run_prediction"]


def run_prediction(job: Job, where: Machine, folder: Path, batch: int | None) -> dict[str, Any] | None:
    """The step of a run by the plan in its folder, as predicted; None where that is no plan of ranks for this job."""
    if not (folder / "plan.json").is_file():
        return None
    try:
        plan = Plan.load(folder / "plan.json")
        graph = job.capture(batch)
        if plan.graph != graph.fingerprint:
            return None
        return timeline_json(predict_timeline(plan, graph, _weights(job, where, graph, batch), links_of(where)))
    except (OutcoreError, ValueError):  # a plan of tiles has no timeline of ranks
        return None


def pipeline_json(job: Job, where: Machine, devices: int, batch: int | None) -> dict[str, Any]:
    """The plan for so many devices, or the reason why there is none."""
    size = batch or batch_for(job, devices)
    graph = job.capture(size)
    try:
        made = make_plan(job, devices=devices, machine=where, batch=size)
    except OutcoreError as refused:
        return {"devices": devices, "refused": str(refused)}
    timeline = predict_timeline(made, graph, _weights(job, where, graph, size), links_of(where))
    calls = made.calls(graph)
    return {
        "devices": devices,
        "arrangement": made.arrangement,
        "schedule": made.schedule,
        "micro_batches": made.micro_batches,
        "replicas": made.replicas,
        "stages": [list(stage) for stage in made.stages],
        "stage_of": {graph.calls[name].block: k for k, stage in enumerate(calls) for name in stage},
        "why": list(made.why),
        "document": made.to_json(),
        "timeline": timeline_json(timeline),
        "peak_bytes": list(timeline.peak_bytes),
        "step_s": timeline.step_s,
        "bubble": timeline.bubble,
    }


def _weights(job: Job, where: Machine, graph: Graph, size: int | None) -> CallWeights:
    """What the planner knows of a job's step."""
    costs = batch_costs(graph, where)
    return weights_on(where, graph, costs, LossAndUpdate.of(job, graph, costs, where, size))
