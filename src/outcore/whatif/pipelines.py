"""Pipelines over ranks, alone and with replicas: plans of `outcore.planner`, asked for their time.

Up to a number of ranks the planner searches stages x replicas itself. Beyond it the plan of that many ranks is one of
several replicas, whose stages reduce their gradients over the link when the step is over: what a rank holds is reduced
with its twins, and the largest share is what the step waits for. The loss is in the recorded network; the update is
added to it, so that a pipeline's step is compared with a data parallel one that has both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import OutcoreError
from outcore.graph import Graph
from outcore.machine.link import Link
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.planner.pipeline.search import plan as search_plan
from outcore.program.plan.document import Plan
from outcore.whatif.links import ClusterLink
from outcore.whatif.recording import Recording
from outcore.whatif.setup import TrainingSetup

__all__ = ["PipelinePlans", "PipelineStep"]

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

    def __init__(self, link: ClusterLink, record: Callable[[TrainingSetup], Recording]) -> None:
        self.link, self.record = link, record
        self._weights: dict[tuple[int, int], tuple[Graph, CallWeights]] = {}
        self._plans: dict[tuple[int, int, str], Plan | str] = {}

    def step(self, recording: Recording, ranks: int, schedule: Schedule) -> PipelineStep | str:
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

    def _planned(self, recording: Recording, ranks: int, schedule: Schedule) -> Plan | str:
        batch = recording.setup.batch
        key = (batch, ranks, schedule)
        if key not in self._plans:
            try:
                if (batch, ranks) not in self._weights:
                    found = self.record(replace(recording.setup, size=batch * ranks))
                    self._weights[batch, ranks] = (found.profile.graph, _weights(found))
                rate = Link.symmetric(bandwidth_bytes_per_s=self.link.bytes_per_s, latency_s=self.link.latency_s)
                self._plans[key] = search_plan(
                    *self._weights[batch, ranks], devices=ranks, schedule=schedule, link=rate
                )
            except OutcoreError as error:
                self._plans[key] = str(error).splitlines()[0]
        return self._plans[key]


def _weights(recording: Recording) -> CallWeights:
    """Those of a recorded training network, with its update."""
    graph, timing = recording.profile.graph, recording.optimizer
    weights = replace(
        CallWeights.of(graph, recording.profile.costs),
        parameter_bytes_per_s=recording.device.bandwidth_bytes_per_s,
    )
    if timing is None:
        return weights
    state = OptimizerCost.of(recording.setup.job.optimizer or 2.0, recording.device.kind).state_per_parameter
    return LossAndUpdate((), max(timing.median_s, timing.dispatch_s), state).added(weights, graph)


def _largest_stage_bytes(made: Plan, recording: Recording) -> int:
    """Gradients of the stage that has most: of several stages, taken as half of all."""
    total = sum(recording.profile.costs.parameters.values())
    return total if len(made.stages) < 2 else total // 2
