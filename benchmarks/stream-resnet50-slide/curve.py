"""Draw time and memory against the side of the image: python curve.py curve.svg results/….json …"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = (4096, 8192, 16384, 32768, 65536, 100000)
SHOWN = {"plain PyTorch": "#d95f02", "streamed, pixels in host memory": "#1b9e77", "streamed from a TIFF": "#7570b3"}


def line(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of one line: all tissue, streamed as far as it goes; of several, the fastest."""
    how = {"plain PyTorch": "plain", "streamed, pixels in host memory": "streamed"}.get(name, name)
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["how"] == how and row.get("tissue", 1) == 1 and not row.get("boundary") and "failed" not in row:
            kept = best.get(row["side"], row)
            best[row["side"]] = min(kept, row, key=lambda r: r["time_s"])
    return [best[side] for side in sorted(best)]


def panel(
    rows: list[dict[str, Any]], left: int, title: str, ticks: list[float], value: Callable[[Any], float]
) -> list[str]:
    """One chart, both axes logarithmic."""

    def at(side: float, number: float) -> tuple[float, float]:
        low, high = ticks[0], ticks[-1]
        return (
            left + 340 * math.log(side / 3500) / math.log(120000 / 3500),
            340 - 290 * math.log(number / low) / math.log(high / low),
        )

    out = [f'<text x="{left}" y="32" font-size="14">{title}</text>']
    for side in SIDES:
        x = at(side, ticks[0])[0]
        out += [f'<path d="M{x:.0f} 50V340" stroke="#e5e5e5"/>']
        out += [f'<text x="{x:.0f}" y="358" text-anchor="middle" font-size="10">{side:,}</text>']
    for tick in ticks:
        y = at(4096, tick)[1]
        out += [f'<path d="M{left} {y:.0f}h340" stroke="#e5e5e5"/>']
        out += [f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>']
    for name, colour in SHOWN.items():
        shown = line(rows, name)
        points = [at(row["side"], value(row)) for row in shown]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), row in zip(points, shown, strict=True):
            fill = "white" if row.get("first_s") == row["time_s"] else colour
            out.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
            )
    dead = [row["side"] for row in rows if row["how"] == "plain" and "failed" in row]
    if dead:
        x, y = at(min(dead), ticks[-1] * 0.8)
        out.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" fill="#d95f02">plain: out of memory</text>')
        out.append(f'<path d="M{x:.0f} {y + 6:.0f}V340" stroke="#d95f02" stroke-dasharray="3 4"/>')
    return out


def draw(rows: list[dict[str, Any]]) -> str:
    """An SVG."""
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 440" font-family="sans-serif" font-size="12">']
    out.append('<rect width="880" height="440" fill="white"/>')
    out += panel(rows, 60, "seconds of a step", [0.1, 1, 10, 100], lambda r: float(r["time_s"]))
    out += panel(rows, 500, "peak memory, GiB", [1, 4, 16, 64, 256], lambda r: r["peak_bytes"] / 2**30)
    out.append('<text x="440" y="382" text-anchor="middle">side of the image, pixels</text>')
    hollow = "hollow: a first step, which also chooses and compiles kernels"
    out.append(f'<text x="440" y="434" text-anchor="middle" fill="#666">{hollow}</text>')
    for i, (name, colour) in enumerate(SHOWN.items()):
        out.append(f'<path d="M{90 + 260 * i} 406h28" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{126 + 260 * i}" y="410">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    rows = [row for path in sys.argv[2:] for row in json.loads(Path(path).read_text())["rows"]]
    Path(sys.argv[1]).write_text(draw(rows))


if __name__ == "__main__":
    main()
