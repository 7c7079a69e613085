"""The table of the newest row of every network, slowest first: `python benchmarks/within-default/table.py`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
RUNS = {  # the oldest first
    "c": "wall-rehearsed",
    "b": "wall-four-steps-tried",
    "a": "wall-graphs-with-less",
    "d": "wall-by-step",
    "e": "wall-trial-repeats-training",
    "f": "wall-captures-abandoned",
    "g": "wall-process-limit",
}
HEAD = (
    "network", "time over plain", "without the wall", "most reserved in the first 16 steps, over the budget",
    "reserved over plain's", "retries, refused", "planning (calls)", "longest step", "second start",
    "gradients bitwise", "run",
)  # fmt: skip


def newest() -> dict[str, tuple[str, dict[str, object]]]:
    found = {}
    for run, name in RUNS.items():
        for row in json.loads((RESULTS / f"2026-11-17-{name}.json").read_text())["rows"]:
            if "error" not in row:
                found[row["network"]] = run, row
    return found


def cells(run: str, row: dict) -> list[str]:  # type: ignore[type-arg]
    budget, seconds = row["budget"], row.get("seconds_by_step")
    return [
        row["network"],
        f"{row['ratio']:.2f}x" + (" (graphs)" if row["as_graphs"] else ""),
        f"{row['without_wall_ms'] / row['plain_ms']:.2f}x",
        f"{row['reserved'] / budget:.2f}",
        f"{row['reserved'] / row['plain_reserved']:.2f}",
        f"{row['retries']}, {row['refused']}",
        f"{row['planning_s']:.1f} s ({row['calls']})",
        f"{max(seconds):.1f} s" if seconds else "",
        f"{row['second_start_s']:.1f} s",
        f"{row['bitwise']} of {row['gradients']}",
        run,
    ]


if __name__ == "__main__":
    rows = sorted(newest().values(), key=lambda found: -float(found[1]["ratio"]))  # type: ignore[arg-type]
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for row in rows:
        print("| " + " | ".join(cells(*row)) + " |")
