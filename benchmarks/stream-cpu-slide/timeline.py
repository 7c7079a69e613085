"""Draw when pixels were read and when tiles were computed: python timeline.py results/….json timeline.svg"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

LEFT, WIDTH, HEIGHT = 110, 820, 26
COLOURS = {"read": "#7570b3", "compute": "#1b9e77", "wait": "#d00000"}


def draw(row: dict[str, Any]) -> str:
    """An SVG of one step."""
    threads = sorted({name for name, _, _ in row["reads"]})
    lanes = [(name.rsplit("_", 1)[-1], [(a, b) for n, a, b in row["reads"] if n == name], "read") for name in threads]
    lanes = [(f"reader {number}", bars, colour) for number, bars, colour in lanes]
    lanes.append(("tiles", [(one[1], two[0]) for one, two in pairwise(row["waits"])], "compute"))
    lanes.append(("waiting", [tuple(w) for w in row["waits"]], "wait"))
    end = row["time_s"]

    def x(seconds: float) -> float:
        return LEFT + WIDTH * seconds / end

    height = 60 + (HEIGHT + 8) * len(lanes)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="sans-serif" font-size="12">'
    ]
    out.append(f'<rect width="960" height="{height}" fill="white"/>')
    for i, (name, bars, colour) in enumerate(lanes):
        y = 10 + (HEIGHT + 8) * i
        busy = sum(b - a for a, b in bars)
        out.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
        out.append(
            f'<text x="{LEFT - 8}" y="{y + 25}" text-anchor="end" fill="#666" font-size="10">{busy:.1f} s</text>'
        )
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#f2f2f2"/>')
        out += [
            f'<rect x="{x(a):.2f}" y="{y}" width="{max(x(b) - x(a), 0.1):.2f}" height="{HEIGHT}" '
            f'fill="{COLOURS[colour]}" stroke="white" stroke-width="0.3"/>'
            for a, b in bars
        ]
    bottom = 22 + (HEIGHT + 8) * len(lanes)
    for tick in range(6):
        at = end * tick / 5
        out.append(f'<text x="{x(at):.0f}" y="{bottom}" text-anchor="middle">{at:.0f} s</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())["rows"]
    Path(sys.argv[2]).write_text(draw(next(r for r in rows if r["what"] == "step")))


if __name__ == "__main__":
    main()
