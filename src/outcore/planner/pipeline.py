"""How a cut network is run, as far as choosing the cut depends on it: what is in flight, and how long a step takes.

A step's samples go through the network in pieces. Which pieces are between their forward and their backward on a rank
at one time is what a schedule decides:

    model_parallel  one after the other; one in flight
    gpipe           all forwards, then all backwards; all in flight
    1f1b            a backward as early as it can be; on stage k of D, min(m, D - k) in flight
    gems            pieces alternate between two replicas whose stages lie in opposite order (rank r holds stages r and
                    D-1-r); a backward of one frees what the next forward of the other fills, so a rank holds the
                    activations of the larger of its two stages, and the parameters of both

The closed forms of time and memory here rank candidates; the simulator of `outcore.program` has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from outcore.errors import PlanError
from outcore.program.stages import Stages

__all__ = ["SCHEDULES", "Pipeline", "Route", "Schedule"]

Schedule = Literal["model_parallel", "gpipe", "1f1b", "gems"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True)
class Route:
    """The link between two ranks, as the planner counts it."""

    bytes_per_s: float = 12e9
    latency_s: float = 20e-6

    def time_s(self, nbytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule with its numbers."""

    schedule: Schedule = "gpipe"
    micro_batches: int = 1
    """Pieces in which one pass goes through the pipeline."""
    batches: int = 1
    """Passes before the optimizer's step (eta of GEMS)."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(f"no schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.micro_batches < 1 or self.batches < 1:
            raise PlanError(
                f"a step needs at least 1 micro-batch and 1 batch, not {self.micro_batches} and {self.batches}"
            )

    @property
    def pieces(self) -> int:
        """Micro-batches in a step."""
        return self.micro_batches * self.batches

    @property
    def paired(self) -> bool:
        """Whether a rank holds two stages."""
        return self.schedule == "gems"

    def in_flight(self, stage: int, count: int) -> int:
        """Micro-batches whose activations a stage holds at most."""
        if self.schedule == "model_parallel":
            return 1
        if self.schedule == "1f1b":
            return min(self.pieces, count - stage)
        return self.micro_batches

    def stage_bytes(self, stages: Stages) -> list[tuple[int, int]]:
        """For every stage, what it always holds and what it holds while a step runs."""
        count = len(stages)
        arriving, leaving = [0] * count, [0] * count
        for edge in stages.edges:
            if edge.has_gradient:
                leaving[edge.source] += edge.bytes
                for target in edge.targets:
                    arriving[target] += edge.bytes
        found = []
        for k, stage in enumerate(stages.stages):
            always = stage.parameter_bytes + stage.gradient_bytes + stage.state_bytes
            moving = self.in_flight(k, count) * stage.saved_bytes + stage.workspace_bytes + arriving[k] + leaving[k]
            found.append((always, moving))
        return found

    def peak_bytes(self, stages: Stages) -> tuple[int, ...]:
        """The most that every rank holds."""
        rows = self.stage_bytes(stages)
        if not self.paired:
            return tuple(always + moving for always, moving in rows)
        return tuple(rows[r][0] + rows[-1 - r][0] + max(rows[r][1], rows[-1 - r][1]) for r in range(len(rows)))

    def busy_s(self, stages: Stages, route: Route) -> list[float]:
        """For every stage, seconds per micro-batch: forward, backward, and what it receives, there and back."""
        busy = [stage.forward_s + stage.backward_s for stage in stages.stages]
        for edge in stages.edges:
            for target in edge.targets:
                busy[target] += route.time_s(edge.bytes) * (2 if edge.has_gradient else 1)
        return busy

    def step_s(self, stages: Stages, route: Route, replicas: int = 1) -> float:
        """Seconds of a step, by closed forms that are exact for equal stages."""
        busy = self.busy_s(stages, route)
        m = self.micro_batches
        if self.schedule == "model_parallel":
            compute = self.pieces * sum(busy)
        elif self.schedule == "gems":
            # A forward follows the backward before it through the ranks: only the longer of the two counts.
            forward = sum(s.forward_s for s in stages.stages)
            message = sum(busy) - sum(s.forward_s + s.backward_s for s in stages.stages)
            ahead = max(s.forward_s for s in stages.stages)
            one = (
                forward + message / 2 + self.batches * (sum(busy) - forward - message / 2) + (self.batches - 1) * ahead
            )
            compute = one + (m - 1) * max(busy) * self.batches
        else:
            compute = self.batches * (sum(busy) + (m - 1) * max(busy))
        return compute + self.reduce_s(stages, route, replicas) + max(s.optimizer_s for s in stages.stages)

    def reduce_s(self, stages: Stages, route: Route, replicas: int) -> float:
        """Seconds to add up gradients: a ring over all copies of a stage."""
        copies = replicas * (2 if self.paired else 1)
        if copies == 1:
            return 0.0
        sizes: Sequence[int] = [s.gradient_bytes for s in stages.stages]
        if self.paired:
            sizes = [a + b for a, b in zip(sizes, reversed(sizes), strict=True)]
        return 2 * (copies - 1) * route.time_s(max(sizes) / copies)
