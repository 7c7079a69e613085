"""Running the suite: what each family reaches on this machine, in the figures of TBD.

Throughput is of real steps. Beside it stand the share of a step in which the device computes, the matrix work over the
device's rate, how busy the host's cores are, and the memory of a step by what it holds: weights, gradients, optimizer,
feature maps, workspace. The memory is that of the step's memory curve, whose peak agrees with what is allocated within
a percent (`benchmarks/step-prediction`).
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import torch

from outcore.bench.families import family
from outcore.errors import OutcoreError
from outcore.machine import Device, format_bytes, format_time, known
from outcore.whatif.recording import record_setup
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.trial import run_setup

__all__ = ["BenchResult", "FamilyResult", "run_suite"]


@dataclass(frozen=True)
class FamilyResult:
    """What one family reached."""

    family: str
    batch: int
    step_s: float = 0.0
    samples_per_s: float = 0.0
    busy_share: float | None = None
    """Share of the step in which the device computes; None where that is not known."""
    peak_share: dict[str, float] = field(default_factory=dict)
    """By precision: matrix work per second over the device's rate."""
    cpu_share: float = 0.0
    """Processor time over elapsed time and cores."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    error: str = ""

    @property
    def held(self) -> str:
        """The memory of a step by what it is for, in words."""
        parts = ((name.replace("_", " "), size) for name, size in self.memory_bytes.items() if size)
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)


@dataclass(frozen=True)
class BenchResult:
    """The suite on one machine."""

    device: str
    torch: str
    date: str
    reduced: bool
    families: tuple[FamilyResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "families": [asdict(f) for f in self.families]}

    def page(self) -> str:
        """A page with one table, for a browser."""
        busy = any(f.busy_share is not None for f in self.families)  # a CPU is what it runs on
        head = ("family", "batch", "step", "samples/s", *(("device busy",) if busy else ()), "share of peak", "CPU")
        head += ("peak memory", "by what it holds")
        rows = []
        for f in self.families:
            cells = [f.family, f"{f.batch:,}", format_time(f.step_s), f"{f.samples_per_s:,.1f}"]
            cells += [] if not busy else ["–" if f.busy_share is None else f"{f.busy_share:.0%}"]
            cells += [", ".join(f"{name} {share:.0%}" for name, share in f.peak_share.items()), f"{f.cpu_share:.0%}"]
            cells += [format_bytes(f.peak_bytes), f.held]
            shown = cells if not f.error else [f.family, f"{f.batch:,}", f.error]
            rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in shown) + "</tr>")
        titles = "".join(f"<th>{name}</th>" for name in head)
        size = "reduced" if self.reduced else "full"
        said = escape(f"{self.device}, torch {self.torch}, {self.date}, {size} size")
        style = (
            "body{font:14px Helvetica,Arial,sans-serif;color:#1f2830;margin:24px}table{border-collapse:collapse}"
            "td,th{padding:6px 12px;text-align:right;border-bottom:1px solid #d5dce1;vertical-align:top}"
            "th{color:#55616b;font-weight:normal}:is(td,th):is(:first-child,:last-child){text-align:left}"
            ":is(td,th):not(:last-child){white-space:nowrap}"
        )
        return (
            f"<!doctype html><meta charset=utf-8><title>outcore bench</title><style>{style}</style>"
            f"<h1>outcore bench</h1><p>{said}</p><table><tr>{titles}</tr>{''.join(rows)}</table>\n"
        )


def run_suite(
    names: Sequence[str],
    *,
    reduced: bool = False,
    seconds: float = 3.0,
    device: Device | None = None,
    progress: Callable[[str], None] | None = None,
    each: Callable[[BenchResult], None] | None = None,
) -> BenchResult:
    """Train steps of every family and measure them; one that fails is reported and the others go on.

    Args:
        names: of families.
        reduced: small networks and batches, for a CPU.
        seconds: how long steps of each are repeated.
        device: where; this machine's first if not given.
        progress: told which family is next.
        each: given what is known after each family, so that a run that is cut off leaves something.
    """
    where = device if device is not None else known().devices[0]
    jobs = [family(name, reduced=reduced) for name in names]
    name = where.name if where.kind == "cuda" else f"{where.name} ({platform.machine()})"
    found: list[FamilyResult] = []

    def so_far() -> BenchResult:
        return BenchResult(name, torch.__version__, str(datetime.date.today()), reduced, tuple(found))

    for job in jobs:
        if progress is not None:
            progress(job.name)
        try:
            found.append(_run(TrainingSetup(job), where, seconds))
        except (OutcoreError, RuntimeError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            found.append(FamilyResult(job.name, job.size, error=said))
        if each is not None:
            each(so_far())
    return so_far()


def _run(setup: TrainingSetup, device: Device, seconds: float) -> FamilyResult:
    kind = "cuda" if device.kind == "cuda" else "cpu"
    recording = record_setup(setup, device)
    begin, worked = time.perf_counter(), time.process_time()
    trial = run_setup(setup, kind, seconds=seconds)
    elapsed = time.perf_counter() - begin
    cpu = (time.process_time() - worked) / elapsed / (os.cpu_count() or 1)
    shares = {p.name: p.flops / trial.step_s / device.rate(p.name) for p in recording.profile.precisions if p.flops}
    held = recording.profile.memory
    memory = {name: int(size) for name, size in asdict(held.at_peak).items() if size}
    busy = trial.busy_s / trial.step_s if trial.busy_s is not None else None
    return FamilyResult(
        setup.job.name,
        setup.batch,
        trial.step_s,
        setup.batch / trial.step_s,
        busy,
        shares,
        cpu,
        memory,
        trial.peak_bytes or held.peak_bytes,
    )
