"""Pipelines over ranks, alone and with replicas: plans of `outcore.planner`, asked for their time.

Up to a number of ranks the planner searches stages x replicas itself. Beyond it the plan of that many ranks is one of
several replicas, whose stages reduce their gradients over the link when the step is over: what a rank holds is reduced
with its twins, and the largest share is what the step waits for. The loss is in the recorded network; the update is
added to it, so that a pipeline's step is compared with a data parallel one that has both.

A plan is made of what calls take, so questions about tasks (a block that is free, convolutions twice as fast) are
brought back to calls (`asked_costs`). A part of the batch is recorded as the batch is, with the same questions, and
says what of every call's time is the same for each micro-batch (`outcore.cost.fixed_times`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.cost.costs import CallCost, Costs
from outcore.cost.fixed_times import with_part
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import OutcoreError
from outcore.graph import Graph
from outcore.machine.clock import TimedRuns
from outcore.machine.link import Link
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.planner.pipeline.search import plan as search_plan
from outcore.program.plan.document import Plan
from outcore.whatif.links import ClusterLink
from outcore.whatif.recorded_step import RecordedStep
from outcore.whatif.recording import SetupRecording

__all__ = ["PipelinePlans", "PipelineStep"]

AskedStep = tuple[SetupRecording, RecordedStep]
"""What was recorded of a batch, and its tasks as a question would have them."""

_MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """What a pipeline's step takes."""

    step_s: float
    bubble: float
    peak_bytes: int
    said: str
    """Stages, micro-batches and replicas, in words."""


class PipelinePlans:
    """The plans of one job over one link, each made once."""

    def __init__(self, link: ClusterLink, recorded: Callable[[int], AskedStep]) -> None:
        self.link, self.recorded = link, recorded
        self._weights: dict[tuple[int, int], tuple[Graph, CallWeights]] = {}
        self._plans: dict[tuple[int, int, str], Plan | str] = {}

    def step(self, recording: SetupRecording, ranks: int, schedule: Schedule) -> PipelineStep | str:
        """The step of the best plan of a schedule; or why there is none, in words.

        Args:
            recording: of one rank's batch, for its device.
            ranks: of the cluster.
            schedule: "gpipe", "1f1b" or "gems".
        """
        together = min(ranks, _MOST_STAGES)
        while ranks % together:
            together -= 1
        made = self._planned(recording, together, schedule)
        if isinstance(made, str):
            return made
        assert made.predicted is not None
        replicas = ranks // together
        reduce_s = self.link.all_reduce_s(_largest_stage_bytes(made, recording), replicas)
        said = f"{len(made.stages)} stages, {made.micro_batches * made.batches} micro-batches"
        every = made.replicas * replicas
        said += f", {every} replicas" if every > 1 else ""
        peak = max(made.predicted.peak_bytes)
        return PipelineStep(made.predicted.time_s + reduce_s, made.predicted.bubble, peak, said)

    def _planned(self, recording: SetupRecording, ranks: int, schedule: Schedule) -> Plan | str:
        batch = recording.setup.batch
        key = (batch, ranks, schedule)
        if key not in self._plans:
            try:
                if (batch, ranks) not in self._weights:
                    self._weights[batch, ranks] = self._weighted(batch * ranks)
                rate = Link.symmetric(
                    bandwidth_bytes_per_s=self.link.bytes_per_s,
                    latency_s=self.link.latency_s,
                    host_s=self.link.link.host_s,
                )
                self._plans[key] = search_plan(
                    *self._weights[batch, ranks], devices=ranks, schedule=schedule, link=rate
                )
            except OutcoreError as error:
                self._plans[key] = str(error).splitlines()[0]
        return self._plans[key]

    def _weighted(self, batch: int) -> tuple[Graph, CallWeights]:
        """The network with a batch, and what the planner knows of it."""
        recording, step = self.recorded(batch)
        costs = with_part(asked_costs(recording, step), batch, lambda size: asked_costs(*self.recorded(size)))
        return recording.profile.graph, _weights(recording, step, costs)


def asked_costs(recording: SetupRecording, step: RecordedStep) -> Costs:
    """The costs of calls whose tasks take another time than recorded, or are gone."""
    costs, before = recording.profile.costs, recording.step
    if step is before:
        return costs

    def asked(cost: CallCost) -> CallCost:
        forward = _asked(cost.forward, f"{cost.call} forward", before, step)
        return replace(cost, forward=forward, backward=_asked(cost.backward, f"{cost.call} backward", before, step))

    return replace(costs, calls={name: asked(cost) for name, cost in costs.calls.items()})


def _asked(timing: TimedRuns | None, task: str, before: RecordedStep, after: RecordedStep) -> TimedRuns | None:
    """What a question makes of a task's time and of the launch before it; None if it is gone."""

    def factor(name: str) -> float:
        was_s = before.tasks[name].time_s if name in before.tasks else 0.0
        return (after.tasks[name].time_s if name in after.tasks else 0.0) / was_s if was_s else 1.0

    if timing is None or (task in before.tasks and task not in after.tasks):
        return None
    return replace(timing.scaled(factor(task)), dispatch_s=timing.dispatch_s * factor(f"launch {task}"))


def _weights(recording: SetupRecording, step: RecordedStep, costs: Costs) -> CallWeights:
    """Those of a recorded training network, with its update."""
    graph = recording.profile.graph
    weights = replace(
        CallWeights.of(graph, costs),
        parameter_bytes_per_s=recording.device.bandwidth_bytes_per_s,
    )
    timing = _asked(recording.optimizer, "optimizer", recording.step, step)
    if timing is None:
        return weights
    kept = OptimizerCost.of(recording.setup.job.update, recording.device.kind)
    return LossAndUpdate((), max(timing.median_s, timing.dispatch_s), kept).added(weights, graph)


def _largest_stage_bytes(made: Plan, recording: SetupRecording) -> int:
    """Gradients of the stage that has most: of several stages, taken as half of all."""
    total = sum(recording.profile.costs.parameters.values())
    return total if len(made.stages) < 2 else total // 2
