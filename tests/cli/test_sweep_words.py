"""What `outcore sweep` says while it runs and at its end, of results that are given."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from outcore.cli.sweep import _activity, _conclude, _run, _table
from outcore.fusion.sweep.trials import TrialResult


def sweep(*results: TrialResult, speedup: float = 3.0, achieved: float | None = 2.0, **more: Any) -> Any:
    best = min((r for r in results if r.value is not None), key=lambda r: r.value or 0.0, default=None)
    return SimpleNamespace(
        results={r.number: r for r in results}, best=best, choices=[SimpleNamespace(speedup=speedup)],
        options=SimpleNamespace(directory=Path("out")), achieved=lambda: achieved, member_steps=40, seconds=4.0,
        stepped=0, activity="training", **more,
    )  # fmt: skip


def result(number: int, value: float | None, state: str = "complete", **settings: Any) -> TrialResult:
    return TrialResult(number, settings, state, value, 10 * number, [])


def said(running: Any) -> str:
    out = io.StringIO()
    _conclude(running, Console(file=out, width=200))
    return out.getvalue()


def test_rows_are_the_best_first_and_those_that_diverged_last() -> None:
    rows = [result(0, 0.5, lr=0.1), result(1, None, "running", lr=1e-5), result(2, 0.25, lr=0.3, wd=1)]
    rows.append(result(3, 0.01, "diverged"))
    table = _table(sweep(*rows))
    columns = {str(c.header): list(c.cells) for c in table.columns}
    assert columns["trial"] == ["2", "0", "1", "3"] and columns["loss"] == ["0.25", "0.5", "", "0.01"]
    assert columns["lr"] == ["0.3", "0.1", "1e-05", ""] and columns["wd"] == ["1", "", "", ""]
    assert columns["state"][-1] == "diverged" and columns["steps"] == ["20", "0", "10", "30"] and not table.caption
    short = _table(sweep(*rows), limit=3)
    assert short.row_count == 3 and str(short.caption) == "and 1 more in out/results.csv"


def test_the_end_says_what_fusing_gained_what_is_best_and_what_was_written() -> None:
    text = said(sweep(result(0, 0.5), result(1, 0.25)))
    assert "40 steps in 4.0 s: 2.00x over one after the other, 3.00x predicted" in text
    assert "best: trial 1, weights in out/best.safetensors" in text
    assert "wrote out/results.csv" in text and "wrote out/curves.svg" in text
    assert "40 steps in 4.0 s, one configuration after the other\n" in said(sweep(result(0, 0.5), speedup=1.0))
    nothing = said(sweep(achieved=None))
    assert "steps in" not in nothing and "best:" not in nothing


def test_what_is_left_is_told_in_seconds_or_minutes() -> None:
    running = sweep()
    assert _activity(running, 100, time.monotonic()) == "training"
    running.stepped = 50
    assert _activity(running, 100, time.monotonic() - 10) == "training: 50 of 100 steps, 10 s left at most"
    assert _activity(running, 1550, time.monotonic() - 10) == "training: 50 of 1,550 steps, 5 min left at most"
    assert _activity(running, 10, time.monotonic() - 10).endswith("0 s left at most")


def test_without_a_terminal_a_line_is_printed_when_something_changed() -> None:
    class Running(SimpleNamespace):
        def run(self) -> None:
            for states in (["running", "running"], ["running", "running"], ["complete", "running"]):
                self.results = {n: result(n, None if s == "running" else 0.5, s) for n, s in enumerate(states)}
                self.best = self.results[0] if states[0] == "complete" else None
                self.on_change(self)
                self.on_progress(self)

    running = Running(
        choices=["two together", "three together"], stepped=0, activity="measuring", best=None, results={}
    )
    out = io.StringIO()
    _run(running, Console(file=out, width=200), 10, live=False)  # type: ignore[arg-type]
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["two together", "three together"]  # each once
    assert [line for line in lines[2:] if line != "measuring"] == [
        "2 running",
        "1 complete, 1 running; best 0.5 (trial 0)",
    ]
    assert lines.count("measuring") == 1  # at most one in some seconds


def test_in_a_terminal_the_table_stays() -> None:
    class Running(SimpleNamespace):
        def run(self) -> None:
            self.on_change(self)
            self.on_progress(self)

    running = Running(**vars(sweep(result(7, 0.5))))
    out = io.StringIO()
    _run(running, Console(file=out, width=80, force_terminal=True), 10, live=True)  # type: ignore[arg-type]
    assert "complete" in out.getvalue() and "7" in out.getvalue()
