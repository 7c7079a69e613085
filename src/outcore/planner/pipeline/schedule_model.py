"""How a cut network is run, as far as choosing the cut depends on it: what is in flight, and how long a step takes.

A step's samples go through the network in pieces. Which pieces are between their forward and their backward on a rank
at one time is what a schedule decides:

    model_parallel  one after the other; one in flight
    gpipe           all forwards, then all backwards; all in flight
    1f1b            a backward as early as it can be; on stage k of D, min(m, D - k) in flight
    gems            pieces alternate between two replicas whose stages lie in opposite order (rank r holds stages r and
                    D-1-r); a backward of one frees what the next forward of the other fills, so a rank holds the
                    activations of the larger of its two stages, and the parameters of both

The closed forms of time and memory here rank candidates. Those of memory are what the simulator of `outcore.program`
finds if transfers take no time; with slow links gradients may wait longer for theirs, so the simulation decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from outcore.errors import PlanError
from outcore.machine.link import Link
from outcore.program.stages import Stages

Schedule = Literal["model_parallel", "gpipe", "1f1b", "gems"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True)
class RankLink:
    """The link between two ranks, as the planner counts it."""

    bytes_per_s: float = 12e9
    latency_s: float = 20e-6
    host_s: float = 0.0
    """What a message takes of the host at either end, which computes nothing meanwhile."""
    adding_s_per_byte: float = 0.0
    """What an all-reduce takes beside moving its bytes."""
    gap_s: float = 0.0
    """From one message to the next, whatever their bytes."""

    @classmethod
    def of(cls, link: Link) -> RankLink:
        """The link between two ranks that a machine has."""
        return cls(link.away_bytes_per_s, link.latency_s, link.host_s, link.adding_s_per_byte, link.gap_s)

    @property
    def link(self) -> Link:
        """The same link as the simulator takes it."""
        return Link.symmetric(
            bandwidth_bytes_per_s=self.bytes_per_s,
            latency_s=self.latency_s,
            host_s=self.host_s,
            adding_s_per_byte=self.adding_s_per_byte,
            gap_s=self.gap_s,
        )

    def time_s(self, nbytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + self.gap_s + 2 * self.host_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Bytes that a stage holds in a step, by how long it holds them."""

    always: int
    moving: int
    """The most that is held only while a step runs."""
    single: int
    """Held while a single micro-batch is in its backward."""
    incoming: int
    """Values that it receives for one micro-batch."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule, with its numbers of micro-batches and of batches."""

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

    def waits_for(self, stage: int, count: int) -> tuple[bool, bool]:
        """Whether, when a stage holds most, there is a buffer for the next gradient, and one for the next value.

        A receive is issued one compute before the one that needs it, so a backward that is followed by another one has
        a second gradient's buffer beside it, and one that is followed by a forward has that forward's input.
        """
        full = self.in_flight(stage, count)
        all_then_back = self.schedule == "gpipe" and full > 1
        return full > 1, not self.paired and not all_then_back and self.pieces > full

    def loads(self, stages: Stages) -> list[StageLoad]:
        """The bytes that every stage holds."""
        count = len(stages)
        arriving, leaving, incoming = [0] * count, [0] * count, [0] * count
        for edge in stages.edges:
            for target in edge.targets:
                incoming[target] += edge.bytes
                arriving[target] += edge.bytes * edge.has_gradient
            leaving[edge.source] += edge.bytes * len(edge.targets) * edge.has_gradient
        found = []
        for k, stage in enumerate(stages.stages):
            always = stage.parameter_bytes + stage.gradient_bytes + stage.state_bytes
            temporary = stage.workspace_bytes + arriving[k] + leaving[k]
            gradient, value = self.waits_for(k, count)
            waiting = max(leaving[k] * gradient, incoming[k] * value)
            moving = max(self.in_flight(k, count) * stage.saved_bytes + temporary + waiting, stage.update_bytes)
            found.append(StageLoad(always, moving, stage.saved_bytes + temporary, incoming[k]))
        return found

    def peak_bytes(self, stages: Stages) -> tuple[int, ...]:
        """The most that every rank holds: what the simulator finds if transfers take no time."""
        loads = self.loads(stages)
        if not self.paired:
            return tuple(load.always + load.moving for load in loads)
        found = []
        for rank, one in enumerate(loads):
            two = loads[-1 - rank]
            always = one.always + (two.always if two is not one and self.batches > 1 else 0)
            moving = [one.moving]
            if self.batches > 1:
                moving += [two.moving, one.single + two.incoming]
            if self.batches > 2:
                moving.append(two.single + one.incoming)
            found.append(always + max(moving))
        return tuple(found)

    def message_s(self, stages: Stages, route: RankLink) -> list[float]:
        """For every stage, seconds per micro-batch for what it receives, values and their gradients going back."""
        found = [0.0] * len(stages)
        for edge in stages.edges:
            for target in edge.targets:
                found[target] += route.time_s(edge.bytes) * (2 if edge.has_gradient else 1)
        return found

    def step_s(self, stages: Stages, route: RankLink, replicas: int = 1) -> float:
        """Seconds of a step, by closed forms that are exact for equal stages."""
        rows = stages.stages
        forward, backward = [s.forward_s for s in rows], [s.backward_s for s in rows]
        messages, gradients = self.message_s(stages, route), [s.gradient_bytes for s in rows]
        return self.pass_s(forward, backward, messages) + self.update_s(
            gradients, max(s.optimizer_s for s in rows), route, replicas
        )

    def pass_s(self, forward: Sequence[float], backward: Sequence[float], messages: Sequence[float]) -> float:
        """Seconds until all gradients are there, from what a micro-batch takes on every stage."""
        busy = [f + b + m for f, b, m in zip(forward, backward, messages, strict=True)]
        if self.schedule == "model_parallel":
            return self.pieces * sum(busy)
        if self.schedule == "1f1b":
            return sum(busy) + (self.pieces - 1) * max(busy)
        if self.schedule == "gpipe":
            return self.batches * (sum(busy) + (self.micro_batches - 1) * max(busy))
        # A forward follows the backward before it through the ranks: only the longer of the two counts.
        there, back = sum(forward) + sum(messages) / 2, sum(backward) + sum(messages) / 2
        one = there + self.batches * back + (self.batches - 1) * max(forward)
        return one + (self.micro_batches - 1) * max(busy) * self.batches

    def update_s(self, gradients: Sequence[float], optimizer_s: float, route: RankLink, replicas: int) -> float:
        """Seconds to add gradients up, a ring over all copies of a stage, and to step."""
        copies = replicas * (2 if self.paired else 1)
        if copies == 1:
            return optimizer_s
        if self.paired:
            gradients = [a + b for a, b in zip(gradients, reversed(gradients), strict=True)]
        return optimizer_s + 2 * (copies - 1) * route.time_s(max(gradients) / copies)
