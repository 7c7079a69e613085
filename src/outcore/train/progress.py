"""The progress of a run: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outcore.machine.units import format_bytes

__all__ = ["BarDisplay", "LineDisplay", "NoDisplay", "ProgressDisplay", "count_rate", "make_show"]

_DRAW_S = 0.5
"""Seconds between two drawings of the bar."""


class ProgressDisplay(Protocol):
    """Where the progress of a run is shown."""

    def begin(self, epochs: int, steps: int, done: int) -> None:
        """Start with so many steps in all, so many done before."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a step."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def end(self) -> None:
        """Stop, after the last step."""


class NoDisplay:
    """Shows nothing."""

    def begin(self, epochs: int, steps: int, done: int) -> None:
        """Nothing."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class LineDisplay:
    """Plain lines, at most one in a while: for log files and batch systems."""

    def __init__(self, console: Console, *, every_s: float = 10.0) -> None:
        self._console, self._every_s = console, every_s
        self._total, self._last = 0, 0.0

    def begin(self, epochs: int, steps: int, done: int) -> None:
        """Remember how many there are."""
        self._total, self._last = epochs * steps, time.monotonic()

    def step(self, row: Mapping[str, Any]) -> None:
        """One line, if the last is old enough."""
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self.say(f"step {row['step'] + 1} of {self._total}: {_figures(row)}")

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Nothing to take down."""


class BarDisplay:
    """A bar for the whole run, with what matters beside it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        wide = console.width >= 100
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn()]
        columns += [TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True)]
        self._wide = wide
        # Drawing belongs between steps: a thread that draws takes the interpreter from the one that feeds the device.
        self._progress = Progress(*columns, console=console, expand=True, auto_refresh=False)
        self._drawn = 0.0
        self._task: Any = None
        self._steps = 1

    def begin(self, epochs: int, steps: int, done: int) -> None:
        """Draw the bar."""
        self._steps = max(1, steps)
        self._epochs = epochs
        self._progress.start()
        self._task = self._progress.add_task("training", total=epochs * steps, completed=done, figures="")

    def step(self, row: Mapping[str, Any]) -> None:
        """Move it."""
        epoch = f"epoch {row['epoch'] + 1}/{self._epochs}"
        figures = _figures(row, short=not self._wide)
        now = time.monotonic()
        draw = now - self._drawn >= _DRAW_S
        self._drawn = now if draw else self._drawn
        self._progress.update(self._task, completed=row["step"] + 1, description=epoch, figures=figures, refresh=draw)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Leave it as it is."""
        self._progress.stop()


def make_show(console: Console, *, rank: int = 0) -> ProgressDisplay:
    """The display that suits the console and the rank."""
    if rank:
        return NoDisplay()
    return BarDisplay(console) if console.is_terminal else LineDisplay(console)


def count_rate(rate: float) -> str:
    """A rate to three digits, or to whole examples.

    >>> count_rate(0.17234), count_rate(1404.6)
    ('0.172', '1,405')
    """
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def _figures(row: Mapping[str, Any], *, short: bool = False) -> str:
    parts = [f"loss {row['loss']:.4g}"]
    rate = row.get("examples_per_s")
    if rate:
        parts.append(count_rate(rate) + ("/s" if short else " examples/s"))
    memory, budget = row.get("memory_bytes"), row.get("budget_bytes")
    if memory:
        parts.append(format_bytes(memory) + (f" of {format_bytes(budget)}" if budget else ""))
    return "  ".join(parts)
