"""Answers for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outcore.machine import format_bytes, format_time
from outcore.whatif.answer import Answer, Answers
from outcore.whatif.elsewhere import Elsewhere
from outcore.whatif.scaling_table import ScalingTable

__all__ = ["answers_table", "gpus_table", "scaling_table"]


def answers_table(found: Answers) -> RenderableType:
    """One row per question: step, interval, gain, memory, and what was measured beside it."""
    rows = [found.base, *found.answers]
    measured = any(row.trial is not None or row.not_run for row in rows)
    table = Table(
        title=f"{found.job} on {found.device}, batch {found.base.batch}", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("if", no_wrap=True)
    for name in (
        "step",
        "interval",
        "samples/s",
        "gain",
        "verdict",
        "peak",
        *(("measured", "gain", "error") if measured else ()),
    ):
        table.add_column(name, justify="right", no_wrap=name != "interval")
    for row in rows:
        low, high = format_time(row.low_s), format_time(row.high_s)
        cells = [row.question, format_time(row.step_s), f"{low} to {high}", _rate(row)]
        cells += [
            f"{row.gain:.2f}x" if row.step_s else "",
            "" if row is found.base else row.verdict,
            format_bytes(row.peak_bytes),
        ]
        table.add_row(*cells, *(_measured(row) if measured else ()))
    reasons = [Text(f"{row.question}: {row.reason}") for row in rows]
    said = [(row.question, note.removeprefix(f"{row.question}: ")) for row in rows for note in row.notes]
    notes = [Text(f"{question}: {note}", style="yellow") for question, note in said]
    notes += [Text(f"{row.question}: not measured, {row.not_run}", style="yellow") for row in rows if row.not_run]
    return Group(table, Text(), *reasons, *notes)


def _rate(row: Answer) -> str:
    return f"{row.batch / row.step_s:,.1f}" if row.step_s else "no limit"


def _measured(row: Answer) -> tuple[str, str, str]:
    if row.trial is None or row.error is None:
        return "", "", ""
    return format_time(row.trial.step_s), f"{row.measured_gain:.2f}x", f"{row.error:+.1%}"


def scaling_table(found: ScalingTable) -> RenderableType:
    """One row per number of GPUs and way to use them, and the verdict."""
    title = f"{found.job} on {found.device} over {found.link}, {found.mode} scaling"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("GPUs", "how", "batch", "step", "interval", "samples/s", "efficiency", "compute", "link", "waits"):
        table.add_column(name, justify="left" if name == "how" else "right", no_wrap=name not in ("how", "interval"))
    alone = next((p for p in found.points if p.gpus == 1), None)
    for p in found.points:
        if p.gpus == 1 and p is not alone:
            continue  # alone, every way is the same step
        low_s, high_s = p.interval_s
        cells = [
            str(p.gpus),
            "alone" if p is alone else f"{p.strategy}: {p.said}" if p.said else p.strategy,
            str(p.batch),
            format_time(p.step_s),
            "" if p is alone else f"{format_time(low_s)} to {format_time(high_s)}",
            f"{p.samples_per_s:,.1f}",
            f"{p.efficiency:.0%}",
        ]
        table.add_row(*cells, *(format_time(s) for s in (p.compute_s, p.communication_s, p.exposed_s)))
    refused = [Text(words, style="yellow") for words in found.refused]
    return Group(table, Text(), Text(found.verdict()), *refused)


def gpus_table(found: Elsewhere) -> RenderableType:
    """One row per GPU."""
    table = Table(
        title=f"{found.job}, carried over from {found.carried_from}", title_justify="left", box=None, pad_edge=False
    )
    rows = found.rows
    more = [
        ("largest batch", any(r.largest_batch is not None for r in rows)),
        ("per epoch", any(r.cost_per_epoch is not None for r in rows)),
        ("kWh per epoch", any(r.energy_per_epoch_kwh is not None for r in rows)),
    ]
    table.add_column("GPU", overflow="fold")
    for name in ("batch", "step", "interval", "samples/s", "peak", *(name for name, shown in more if shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        interval = f"{format_time(row.low_s)} to {format_time(row.high_s)}"
        peak = Text(format_bytes(row.peak_bytes), style="" if row.fits else "bold red")
        cells: list[str | Text] = [
            row.gpu,
            str(row.batch),
            format_time(row.step_s),
            interval,
            f"{row.samples_per_s:,.1f}",
            peak,
        ]
        extra = (row.largest_batch, row.cost_per_epoch, row.energy_per_epoch_kwh)
        table.add_row(*cells, *(_shown(v) for v, (_, shown) in zip(extra, more, strict=True) if shown))
    reasons = [Text(f"{row.gpu}: the {row.bound_by} sets the pace; figures: {row.source}") for row in rows]
    large = [
        Text(f"{row.gpu}: does not fit in {format_bytes(row.capacity_bytes)}", style="red")
        for row in rows
        if not row.fits
    ]
    return Group(table, Text(), *reasons, *large)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,d}" if isinstance(value, int) else f"{value:,.2f}"
