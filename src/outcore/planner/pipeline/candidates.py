"""Ways to share devices: stages x replicas, a schedule, micro-batches and batches.

The batch of a step is divided among the replicas, and each replica's share into pieces of equal size, each divisor of
the share being a possible number of pieces. The schedule decides how pieces go through the pipeline: GPipe and GEMS
group them into batches that pass one after the other, which bounds what is in flight.

Many candidates are ranked by rough cuts: few places of the recorded order, and figures straight from the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from outcore.planner.partition.dynamic_programs import cut_line
from outcore.planner.partition.interval_tables import IntervalTables
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.topological_orders import coarse_places
from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.planner.pipeline.schedule_model import SCHEDULES, Pipeline, RankLink, Schedule

MOST_PIECES = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to share the devices, with its expected time and memory."""

    stages: int
    replicas: int
    pipeline: Pipeline
    time_s: float = 0.0
    peak_bytes: int = 0
    shared: bool = True
    """Whether the replicas divide one batch among them, or each has a batch of its own."""
    order: tuple[str, ...] = ()
    """What the ranks of a pipeline compute, where it is not the order of the schedule."""
    policy: tuple[tuple[str, str], ...] = ()
    """Values that its stages do not keep, with what is done instead."""

    @property
    def fraction(self) -> float:
        """The part of the batch that one piece is."""
        return 1 / ((self.replicas if self.shared else 1) * self.pipeline.pieces)

    @property
    def part(self) -> tuple[float, int]:
        """The part of the batch that one piece is (`fraction`), and the number of pieces of a step."""
        return self.fraction, self.pipeline.pieces

    @property
    def batches_trained(self) -> int:
        """Batches of the recorded size that one step trains on."""
        return 1 if self.shared else self.replicas

    @property
    def in_flight(self) -> float:
        """The part of the batch that one pass holds, at least."""
        together = 1 if self.pipeline.schedule == "1f1b" else self.pipeline.micro_batches
        return self.fraction * together

    def __str__(self) -> str:
        p = self.pipeline
        if self.stages == 1:
            said = f"data parallel, {self.replicas} replicas" if self.replicas > 1 else "one stage"
        else:
            copies = f" x {self.replicas} replicas" if self.replicas > 1 else ""
            said = f"{self.stages} stages{copies}, {p.schedule}{' in an order of its own' if self.order else ''}"
        said += f", {p.micro_batches} micro-batches" if p.micro_batches > 1 else ""
        said += f", {p.batches} batches in turn" if p.batches > 1 else ""
        return said + (f", {len(self.policy)} values not kept" if self.policy else "")


def candidates_for(
    units: int, devices: int, samples: int, schedule: Schedule | None, *, shared: bool = True
) -> list[Candidate]:
    """Every way to share so many devices and samples.

    Where a schedule is named, a pipeline is wanted: on several devices the network is then cut.
    """
    found = []
    for stages in _divisors(devices):
        replicas = devices // stages
        if stages > units or (shared and samples % replicas) or (stages == 1 < devices and schedule is not None):
            continue
        for pieces in _divisors(samples // replicas if shared else samples):
            if pieces > MOST_PIECES:
                break
            for name in SCHEDULES if schedule is None else (schedule,):
                if stages > 1 or name == "model_parallel" or schedule is not None:
                    found += [Candidate(stages, replicas, p, shared=shared) for p in _pipelines(name, pieces)]
    return found


def _pipelines(schedule: Schedule, pieces: int) -> Iterator[Pipeline]:
    if schedule == "model_parallel":
        yield Pipeline(schedule, 1, pieces)
    elif schedule == "1f1b":
        if pieces > 1:
            yield Pipeline(schedule, pieces, 1)
    else:
        for together in _divisors(pieces):
            # One at a time is plain model parallelism for GPipe; a single batch leaves GEMS' second replica idle.
            if together > 1 if schedule == "gpipe" else pieces > together:
                yield Pipeline(schedule, together, pieces // together)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, slots=True)
class EvenCut:
    """Lower bounds from pieces of one size that are cut evenly: nothing is faster or smaller."""

    forward_s: float
    backward_s: float
    held_bytes: int
    always_bytes: float
    weight_bytes: int

    @classmethod
    def of(cls, pieces: WeightedUnits) -> EvenCut:
        """Add up times, saved bytes and parameters of all pieces."""
        weights = sum(nbytes for _, nbytes, _ in pieces.parameters)
        always = (2 + pieces.state_per_parameter) * weights + sum(nbytes for _, nbytes, _ in pieces.fixed)
        held = sum(f.bytes for f in pieces.memory_uses if f.savers)
        return cls(sum(pieces.forward_s), sum(pieces.backward_s), held, always, weights)

    def time_s(self, candidate: Candidate, route: RankLink) -> float:
        """A step without messages, cut evenly."""
        count, pipeline = candidate.stages, candidate.pipeline
        even = [self.forward_s / count] * count, [self.backward_s / count] * count, [0.0] * count
        return pipeline.pass_s(*even) + pipeline.update_s(
            [self.weight_bytes / count] * count, 0.0, route, candidate.replicas
        )

    def peak_bytes(self, candidate: Candidate) -> float:
        """A lower bound of the largest rank's peak."""
        flying = 1 if candidate.pipeline.schedule == "1f1b" else candidate.pipeline.in_flight(0, candidate.stages)
        copies = 2 if candidate.pipeline.paired and candidate.stages > 1 else 1
        return (copies * self.always_bytes + flying * self.held_bytes) / candidate.stages


class RoughCut:
    """Rough cuts of the same pieces; tables are kept between them."""

    def __init__(self, pieces: WeightedUnits) -> None:
        self.pieces = pieces
        self._lines: dict[int, IntervalTables] = {}

    def cut(
        self, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: RankLink, replicas: int
    ) -> tuple[float, int] | None:
        """Seconds of a step and peak of the largest rank, or None if no cut at these places fits."""
        line = self._line(max(2 * count, 24 if pipeline.paired else 64))
        if count > line.size:
            return None
        cuts = cut_line(line, count, balance, pipeline, cap, route)
        return min((self._figures(line, ends, pipeline, route, replicas) for ends in cuts), default=None)

    def _line(self, most: int) -> IntervalTables:
        if most not in self._lines:
            order = tuple(range(len(self.pieces)))
            self._lines[most] = IntervalTables(self.pieces, order, coarse_places(self.pieces, order, most))
        return self._lines[most]

    def _figures(
        self, line: IntervalTables, ends: list[int], pipeline: Pipeline, route: RankLink, replicas: int
    ) -> tuple[float, int]:
        count, at = len(ends), ([0, *ends[:-1]], ends)
        forward, messages = line.forward_s[at].tolist(), line.message_s(route)[at].tolist()
        backward = (line.time_s[at] - line.forward_s[at]).tolist()
        weights = line.weight_bytes[at]
        update_s = (3 + 2 * self.pieces.state_per_parameter) * float(weights.max()) / self.pieces.update_bytes_per_s
        time_s = pipeline.pass_s(forward, backward, messages)
        time_s += pipeline.update_s(weights.tolist(), update_s, route, replicas)
        moving = np.array(
            [line.moving_bytes(pipeline, k, count)[a, b] for k, (a, b) in enumerate(zip(*at, strict=True))]
        )
        always = line.always_bytes()[at]
        if pipeline.paired:
            return time_s, int(max(always + always[::-1] + np.maximum(moving, moving[::-1])))
        return time_s, int(max(always + moving))
