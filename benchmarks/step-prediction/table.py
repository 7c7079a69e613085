"""The tables of the README, made from a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str | None]]

WAITING = 0.05
"""Share of the predicted step in which the device waits, from which on the host sets the pace."""
UNDISTURBED = 1.2
"""Beats beside a step, over that of an undisturbed host, up to which the step counts as undisturbed."""


def table(rows: list[Row]) -> str:
    """Markdown: one line per case, then the errors' medians and worst; cases of the device and of the host apart."""
    good = [row for row in rows if "error" not in row]
    parts = []
    for bound, title in (("device", "The device sets the pace"), ("host", "The host sets the pace")):
        chosen = [row for row in rows if bound_of(row) == bound]
        if chosen:
            columns = COLUMNS + (DRIFT if bound == "host" else [])
            columns = [c for c in columns if any(c[1](row) for row in chosen if "error" not in row)] or COLUMNS[:1]
            summary = _summary([row for row in chosen if row in good])
            parts += [f"**{title}** ({len(chosen)} cases)", "", *_lines(chosen, columns), "", *summary, ""]
    return "\n".join(parts)


def bound_of(row: Row) -> str:
    """Which of the two a case is: as it was chosen, else by how long the device waits; on a CPU they are one."""
    if "bound" in row:
        return str(row["bound"])
    if "error" in row or "measured_processor_s" in row:
        return "device"
    return "host" if row["predicted_parts_s"]["wait"] > WAITING * row["predicted_s"] else "device"


def real_time(row: Row) -> float:
    """What a step took: on a CPU that others use too, the processor's time, which one thread makes the step's."""
    return float(row.get("measured_processor_s", row["measured_s"]))


def time_error(row: Row) -> float:
    """Of the step predicted from measured calls."""
    return float(row["predicted_s"] / real_time(row) - 1)


def undisturbed_error(row: Row) -> float | None:
    """Of the same against steps beside which the host kept the pace that the prediction is for."""
    beats = zip(row.get("steps_s", ()), row.get("beats_s", ()), strict=True)
    steps = [step for step, beat in beats if beat <= UNDISTURBED * row["beat_s"]]
    return row["predicted_s"] / statistics.median(steps) - 1 if len(steps) > 2 else None


def drift(row: Row) -> float | None:
    """How much longer a step took in the second half of the case than in the first."""
    steps = row.get("steps_s", ())
    half = len(steps) // 2
    return statistics.median(steps[half:]) / statistics.median(steps[:half]) - 1 if half > 1 else None


def peak_error(row: Row) -> float:
    """Of the predicted peak."""
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def against(row: Row, name: str, truth: str) -> float | None:
    """The error of one figure against another."""
    real = real_time(row) if truth == "time" else row["measured_bytes"]
    return row[name] / real - 1 if row.get(name) else None


def _missing(row: Row) -> str:
    return f" ({row['unmeasured']} calls missing)" if row["unmeasured"] else ""


COLUMNS: list[Column] = [
    ("step measured", lambda r: f"{real_time(r) * 1e3:.1f} ms"),
    ("from measured calls", lambda r: f"{time_error(r):+.1%}{_missing(r)}"),
    ("by estimate", lambda r: _signed(against(r, "estimated_s", "time"))),
    ("RuntimeEstimator", lambda r: _signed(against(r, "runtime_estimator_s", "time"))),
    ("its benchmark mode", lambda r: _signed(against(r, "runtime_estimator_benchmark_s", "time"))),
    ("peak measured", lambda r: f"{r['measured_bytes'] / 2**20:,.0f} MiB"),
    ("predicted", lambda r: _signed(peak_error(r))),
    ("MemTracker", lambda r: _signed(against(r, "memtracker_bytes", "bytes"))),
]
DRIFT: list[Column] = [
    ("against undisturbed steps", lambda r: _signed(undisturbed_error(r))),
    ("slowest over fastest step", lambda r: f"{max(r['steps_s']) / r['fastest_s']:.2f}" if "steps_s" in r else None),
    ("second half over first", lambda r: _signed(drift(r))),
]
ERRORS: dict[str, Callable[[Row], float | None]] = {
    "step from measured calls": time_error,
    "the same, against undisturbed steps": lambda r: undisturbed_error(r) if bound_of(r) == "host" else None,
    "step by estimate": lambda r: against(r, "estimated_s", "time"),
    "step by torch's RuntimeEstimator": lambda r: against(r, "runtime_estimator_s", "time"),
    "the same in its benchmark mode": lambda r: against(r, "runtime_estimator_benchmark_s", "time"),
    "peak memory": peak_error,
    "peak by torch's MemTracker": lambda r: against(r, "memtracker_bytes", "bytes"),
    "plain's own step, second half of a case against the first": lambda r: drift(r) if bound_of(r) == "host" else None,
}


def _lines(rows: list[Row], columns: list[Column]) -> list[str]:
    names = ["network", "batch", "precision", *(name for name, _ in columns)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [row["network"], str(row["batch"]), row["precision"]]
        failed = "error" in row
        cells += (
            [f"failed: {row['error']}", *[""] * (len(columns) - 1)] if failed else [c(row) or "" for _, c in columns]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _summary(rows: list[Row]) -> list[str]:
    lines = ["| error of | median | 90th percentile | worst | cases |", "|---|---|---|---|---|"]
    for name, error in ERRORS.items():
        found = sorted(abs(e) for e in map(error, rows) if e is not None)
        if found:
            p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
            lines.append(f"| {name} | {statistics.median(found):.1%} | {p90:.1%} | {found[-1]:.1%} | {len(found)} |")
    return lines


def _signed(error: float | None) -> str | None:
    return f"{error:+.1%}" if error is not None else None
