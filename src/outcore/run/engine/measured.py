"""What a step really took, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from outcore.machine.units import format_bytes, format_time
from outcore.program import Event, Program, Stages, Timeline, simulate
from outcore.program.simulator.memory_curve import RankMemory
from outcore.program.simulator.part_time import PartBytes, PartCompute, SplitStageCosts
from outcore.program.timeline import COMPUTE
from outcore.run.engine.build import EngineParts
from outcore.run.engine.step_meters import clock_offset
from outcore.run.engine.worker import Worker
from outcore.run.ranks.world import World
from outcore.run.transport.p2p import HostPointToPoint


def gather(world: World, worker: Worker, name: str) -> Timeline:
    """The timeline of the last step from all ranks; collective."""
    offset = clock_offset(world)
    mine = {
        "start": worker.started_s + offset,
        "events": [list(event) for event in worker.events()],
        "memory": worker.gauge.curve(worker.started_s).to_json(),
    }
    shared = world.share(mine)
    zero = min(row["start"] for row in shared)
    events = []
    for row in shared:
        late = row["start"] - zero
        for event in (Event(*fields) for fields in row["events"]):
            events.append(event._replace(start_s=event.start_s + late, end_s=event.end_s + late))
    events.sort(key=lambda event: event.start_s)
    return Timeline(name, tuple(events), tuple(RankMemory.from_json(row["memory"]) for row in shared))


def with_measured_times(stages: Stages, timeline: Timeline) -> Stages:
    """The stages with the mean times of forwards and backwards in a timeline."""
    lengths: dict[tuple[int, ...], dict[str, float]] = {}
    for event in timeline.events:  # a compute that waits for neighbours is several events
        if event.stream == COMPUTE:
            of = (event.stage, event.rank, event.micro_batch, event.replica)
            kinds = lengths.setdefault(of, {})
            kinds[event.kind] = kinds.get(event.kind, 0.0) + event.end_s - event.start_s
    found: dict[tuple[int, str], list[float]] = {}
    for (stage, *_), by_kind in lengths.items():
        for kind, length_s in by_kind.items():
            found.setdefault((stage, kind), []).append(length_s)

    def mean(stage: int, kind: str) -> float:
        times = found.get((stage, kind), [0.0])
        return sum(times) / len(times)

    return Stages(
        tuple(
            replace(s, forward_s=mean(k, "forward"), backward_s=mean(k, "backward"), optimizer_s=mean(k, "step"))
            for k, s in enumerate(stages.stages)
        ),
        stages.edges,
        stages.ties,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measured step beside a predicted one."""

    predicted: Timeline
    measured: Timeline

    @classmethod
    def with_schedule(cls, program: Program, stages: Stages, measured: Timeline, parts: int = 1) -> Comparison:
        """Compare with a prediction from the program and the measured times of single stages: what the schedule alone
        explains. Of a first stage on a grid of so many `parts`, that is computing without messages."""
        timed = with_measured_times(stages, measured)
        first, split = timed.stages[0], None
        if parts > 1:
            forward, backward = (PartCompute((s,) * parts) for s in (first.forward_s, first.backward_s))
            split = SplitStageCosts((forward,), (backward,), (PartBytes(),) * parts)
        return cls(simulate(program, timed, split=split), measured)

    @property
    def ratio(self) -> float:
        """Measured over predicted time of a step."""
        return self.measured.step_s / self.predicted.step_s if self.predicted.step_s else float("inf")

    def __str__(self) -> str:
        p, m = self.predicted, self.measured
        lines = [f"step {format_time(m.step_s)} measured, {format_time(p.step_s)} predicted (x{self.ratio:.3f})"]
        lines.append(
            f"{'rank':>5} {'busy':>9} {'predicted':>9} {'idle':>9} {'predicted':>9} {'peak':>10} {'predicted':>10}"
        )
        rows = zip(m.busy_s(), p.busy_s(), m.idle_s(), p.idle_s(), m.peak_bytes, p.peak_bytes, strict=True)
        for rank, (busy, busy_p, idle, idle_p, peak, peak_p) in enumerate(rows):
            times = " ".join(f"{format_time(t):>9}" for t in (busy, busy_p, idle, idle_p))
            lines.append(f"{rank:>5} {times} {format_bytes(peak):>10} {format_bytes(peak_p):>10}")
        return "\n".join(lines)


def held_tensors(
    assembly: EngineParts, worker: Worker, optimizer: torch.optim.Optimizer | None
) -> Iterator[torch.Tensor]:
    """Tensors that take memory of this rank's device; idle state that waits elsewhere does not."""
    idle_state = worker.idle_state
    away = {t.data_ptr() for t in idle_state.offloaded} if idle_state is not None else set()
    found = [*assembly.local_state().values()]
    found += [p.grad for p in assembly.parameters.values() if p.grad is not None]
    if optimizer is not None:
        for row in optimizer.state.values():
            found += [value for value in row.values() if isinstance(value, torch.Tensor)]
    yield from (tensor for tensor in found if tensor.data_ptr() not in away)
    if isinstance(worker.p2p, HostPointToPoint):
        yield from worker.p2p.arena.rows()
