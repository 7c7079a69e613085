"""The table of steps on a slide, from result files: predicted beside measured.

python benchmarks/train-application/table.py results/a.json results/b.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from outcore.machine.units import format_bytes


def row(path: Path) -> str:
    """One run, in a line."""
    found = json.loads(path.read_text())
    part = next(p for p in found["parts"] if p["part"] == "slide")
    planned, measured, tiles = part["planned"], part["measured"], part["tiles_of_last_step"]
    first, *steady = measured["steps_s"]
    step = statistics.median(steady or [first])
    cells = [
        f"[{path.stem}](results/{path.name})",
        f"{100 * part['tissue']:.0f} %",
        str(tiles["forward"]),
        _beside(planned["peak_bytes"], measured["peak_bytes"], format_bytes),
        _beside(planned["step_s"], step, lambda s: f"{s:.1f} s"),
        f"{first:.1f} s",
        f"{part['waited_for_pixels_s']:.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def _beside(predicted: float, measured: float, shown: object) -> str:
    assert callable(shown)
    return f"{shown(predicted)}, {shown(measured)}, {measured / predicted:.2f}"


if __name__ == "__main__":
    print("| run | tissue | tiles computed | peak: predicted, measured, ratio | step: the same | first step | waited |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in sys.argv[1:]:
        print(row(Path(name)))
