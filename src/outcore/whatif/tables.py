"""Answers for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outcore.machine import format_bytes, format_time
from outcore.whatif.answer import Answer, Answers

__all__ = ["answers_table"]


def answers_table(found: Answers) -> RenderableType:
    """One row per question: step, interval, gain, memory, and what was measured beside it."""
    rows = [found.base, *found.answers]
    measured = any(row.trial is not None or row.not_run for row in rows)
    table = Table(title=f"{found.job} on {found.device}, batch {found.base.batch}", title_justify="left", box=None)
    table.add_column("if", overflow="fold")
    for name in ("step", "interval", "samples/s", "gain", "peak", *(("measured", "gain", "error") if measured else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        low, high = format_time(row.low_s), format_time(row.high_s)
        cells = [row.question, format_time(row.step_s), f"{low} to {high}", f"{row.batch / row.step_s:,.1f}"]
        cells += [f"{row.gain:.2f}x", format_bytes(row.peak_bytes)]
        table.add_row(*cells, *(_measured(row) if measured else ()))
    reasons = [Text(f"{row.question}: {row.reason}") for row in rows]
    notes = [Text(f"{row.question}: {note}", style="yellow") for row in rows for note in row.notes]
    notes += [Text(f"{row.question}: not measured, {row.not_run}", style="yellow") for row in rows if row.not_run]
    return Group(table, Text(), *reasons, *notes)


def _measured(row: Answer) -> tuple[str, str, str]:
    if row.trial is None or row.error is None:
        return "", "", ""
    return format_time(row.trial.step_s), f"{row.measured_gain:.2f}x", f"{row.error:+.1%}"
