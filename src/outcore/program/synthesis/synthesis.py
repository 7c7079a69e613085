"""The best order for given stages under a memory cap: named schedules and synthesised ones, by simulated time.

The list scheduler is tried with every rule of preference, several windows of micro-batches under way, and both
placements; each order, like each named schedule, is compiled and simulated, and the fastest whose peaks are within
the cap is taken. So the result is never worse than the best named schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.errors import ProgramError
from outcore.machine.units import format_bytes, format_time
from outcore.program.compile import compile_program
from outcore.program.instructions import Compute
from outcore.program.program import Program
from outcore.program.simulator.links import Links
from outcore.program.simulator.simulate import simulate
from outcore.program.stages import Stages
from outcore.program.synthesis.list_scheduler import RULES, SchedulerSettings, list_schedule
from outcore.program.timeline import Timeline
from outcore.program.written_order import program_in_order, write_order


@dataclass(frozen=True, slots=True)
class SynthesisCandidate:
    """A program, what it takes, and whether it is within the cap."""

    program: Program
    timeline: Timeline
    fits: bool
    named: bool

    @property
    def step_s(self) -> float:
        """The simulated time of a step."""
        return self.timeline.step_s

    @property
    def peak_bytes(self) -> int:
        """The greatest peak of all ranks."""
        return max(self.timeline.peak_bytes)


@dataclass(frozen=True, slots=True)
class SynthesisResult:
    """The best candidate and all others, fastest first among those that fit, then the rest."""

    candidates: tuple[SynthesisCandidate, ...]

    @property
    def best(self) -> SynthesisCandidate:
        """The fastest that fits."""
        return self.candidates[0]

    @property
    def best_named(self) -> SynthesisCandidate | None:
        """The fastest named schedule that fits."""
        return next((c for c in self.candidates if c.named and c.fits), None)

    @property
    def gain(self) -> float:
        """How many times faster than the best named schedule the best is; infinite when no named one fits."""
        return self.best_named.step_s / self.best.step_s if self.best_named is not None else float("inf")

    def __str__(self) -> str:
        rows = [f"{'step':>9} {'peak':>10}  schedule"]
        for c in self.candidates[:12]:
            note = "" if c.fits else "  (over the cap)"
            rows.append(f"{format_time(c.step_s):>9} {format_bytes(c.peak_bytes):>10}  {c.program.name}{note}")
        return "\n".join(rows)


def synthesise(
    stages: Stages,
    *,
    micro_batches: int,
    memory_bytes: int | Sequence[int] | None = None,
    links: Links | None = None,
    replicas: int = 1,
) -> SynthesisResult:
    """The best program for `micro_batches` in one step, one stage to a rank, within `memory_bytes` on each rank.

    >>> choice = synthesise(Stages.uniform(4), micro_batches=8)
    >>> choice.best_named.step_s, choice.best.step_s
    (33.0, 27.0)

    Args:
        stages: the network.
        micro_batches: in the step, per pipeline.
        memory_bytes: the cap of every rank of a pipeline, or of each; None for none.
        links: between the ranks.
        replicas: data-parallel replicas of the pipeline.

    Raises:
        ProgramError: if nothing fits, with the smallest cap that would do.
    """
    links = links or Links()
    depth = len(stages)
    caps = None
    if memory_bytes is not None:
        caps = (memory_bytes,) * depth if isinstance(memory_bytes, int) else tuple(memory_bytes)
        if len(caps) != depth:
            raise ProgramError(f"got {len(caps)} memory caps; needed one for each of {depth} ranks")
    found = [_candidate(p, stages, links, caps, named=True) for p in named_programs(stages, micro_batches, replicas)]
    for setting, orders in synthesised_orders(stages, micro_batches, caps, links):
        program = program_in_order(
            stages, write_order(orders), inverted=setting.inverted, replicas=replicas, name=str(setting)
        )
        found.append(_candidate(program, stages, links, caps, named=False))
    found.sort(key=lambda c: (not c.fits, c.step_s, c.peak_bytes, not c.named))
    if not found[0].fits:
        least = min(found, key=lambda c: c.peak_bytes)
        raise ProgramError(
            f"no order of {micro_batches} micro-batches over {depth} ranks fits the memory cap; "
            f"the smallest that works is {format_bytes(least.peak_bytes)} ({least.program.name})"
        )
    return SynthesisResult(tuple(found))


def named_programs(stages: Stages, micro_batches: int, replicas: int = 1) -> Iterator[Program]:
    """Every named schedule of so many micro-batches, with every division into batches where that matters."""
    yield compile_program(stages, "model-parallel", micro_batches=micro_batches, replicas=replicas)
    yield compile_program(stages, "1f1b", micro_batches=micro_batches, replicas=replicas)
    for size in (n for n in range(1, micro_batches + 1) if micro_batches % n == 0):
        batches = micro_batches // size
        if size > 1:
            yield compile_program(stages, "gpipe", micro_batches=size, batches=batches, replicas=replicas)
        if batches > 1:
            yield compile_program(stages, "gems-master", micro_batches=size, batches=batches, replicas=replicas)


def synthesised_orders(
    stages: Stages, micro_batches: int, caps: tuple[int, ...] | None, links: Links
) -> Iterator[tuple[SchedulerSettings, list[list[Compute]]]]:
    """Every order that the list scheduler finds for one pipeline, once, with how it was told to look for it."""
    seen: set[tuple[tuple[Compute, ...], ...]] = set()
    for inverted in (False, True) if micro_batches > 1 and len(stages) > 1 else (False,):
        for window in _windows(micro_batches, len(stages)):
            for rule in RULES:
                setting = SchedulerSettings(rule, window, inverted, caps)
                orders = list_schedule(stages, micro_batches, setting, links)
                if orders is not None and (order := tuple(map(tuple, orders))) not in seen:
                    seen.add(order)
                    yield setting, orders


def _windows(micro_batches: int, depth: int) -> list[int]:
    """All small numbers of micro-batches under way, then ever fewer."""
    wanted = {1, 2, 3, 4, 6, 8, 12, 16, depth - 1, depth, depth + 1, 2 * depth, micro_batches}
    return sorted(window for window in wanted if 1 <= window <= micro_batches)


def _candidate(
    program: Program, stages: Stages, links: Links, caps: tuple[int, ...] | None, *, named: bool
) -> SynthesisCandidate:
    timeline = simulate(program, stages, links)
    peaks = timeline.peak_bytes
    fits = caps is None or all(peak <= caps[rank % len(caps)] for rank, peak in enumerate(peaks))
    return SynthesisCandidate(program, timeline, fits, named)
