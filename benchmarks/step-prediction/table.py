"""The tables of the README, made from a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def table(rows: list[Row]) -> str:
    """Markdown: one line per case, then the errors' medians and worst."""
    lines = [
        "| network | batch | precision | step measured | from measured calls | by estimate | RuntimeEstimator "
        "| peak measured | predicted | MemTracker |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['network']} | {row['batch']} | {row['precision']} |"
        if "error" in row:
            lines.append(f"{head} failed: {row['error']} | | | | | | |")
            continue
        missing = f" ({row['unmeasured']} calls missing)" if row["unmeasured"] else ""
        lines.append(
            f"{head} {real_time(row) * 1e3:.1f} ms "
            f"| {_signed(time_error(row))}{missing} | {_signed(estimate_error(row))} "
            f"| {_signed(_against(row, 'runtime_estimator_s', real_time(row)))} "
            f"| {row['measured_bytes'] / 2**20:,.0f} MiB | {_signed(bytes_error(row))} "
            f"| {_signed(_against(row, 'memtracker_bytes', row['measured_bytes']))} |"
        )
    good = [row for row in rows if "error" not in row]
    lines.append("")
    lines.append("| error of | median | 90th percentile | worst | cases |")
    lines.append("|---|---|---|---|---|")
    columns: dict[str, Callable[[Row], float | None]] = {
        "step from measured calls": time_error,
        "step by estimate": estimate_error,
        "step by torch's RuntimeEstimator": lambda r: _against(r, "runtime_estimator_s", real_time(r)),
        "peak memory": bytes_error,
        "peak by torch's MemTracker": lambda r: _against(r, "memtracker_bytes", r["measured_bytes"]),
    }
    for name, error in columns.items():
        found = sorted(abs(e) for e in map(error, good) if e is not None)
        if found:
            p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
            lines.append(f"| {name} | {statistics.median(found):.1%} | {p90:.1%} | {found[-1]:.1%} | {len(found)} |")
    return "\n".join(lines)


def real_time(row: Row) -> float:
    """What a step took: on a CPU that others use too, the processor's time, which one thread makes the step's."""
    return float(row.get("measured_processor_s", row["measured_s"]))


def time_error(row: Row) -> float:
    """Of the step predicted from measured calls."""
    return float(row["predicted_s"] / real_time(row) - 1)


def estimate_error(row: Row) -> float | None:
    """Of the step predicted without running anything."""
    return _against(row, "estimated_s", real_time(row))


def bytes_error(row: Row) -> float:
    """Of the predicted peak."""
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def _against(row: Row, name: str, truth: float) -> float | None:
    return row[name] / truth - 1 if row.get(name) else None


def _signed(error: float | None) -> str:
    return f"{error:+.1%}" if error is not None else ""
