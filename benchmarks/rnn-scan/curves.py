"""Draw the training curve and the speed-up over the length: python curves.py curves.svg results/….json"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]
ORANGE, GREEN, PURPLE = "#d95f02", "#1b9e77", "#7570b3"


def chart(left: int, title: str, below: str, x_ticks: list[float], y_ticks: list[float], marks: list[str]) -> list[str]:
    """Axes, grid and what is drawn on it."""
    out = [f'<text x="{left}" y="32" font-size="14">{title}</text>']
    for i, tick in enumerate(x_ticks):
        x = left + 340 * i / (len(x_ticks) - 1)
        out += [f'<path d="M{x:.0f} 50V340" stroke="#e5e5e5"/>']
        out += [f'<text x="{x:.0f}" y="358" text-anchor="middle">{tick:,.6g}</text>']
    for i, tick in enumerate(y_ticks):
        y = 340 - 290 * i / (len(y_ticks) - 1)
        out += [f'<path d="M{left} {y:.0f}h340" stroke="#e5e5e5"/>']
        out += [f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>']
    return [*out, f'<text x="{left + 170}" y="380" text-anchor="middle">{below}</text>', *marks]


def line(points: Points, colour: str, dots: bool) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'] if not dots else []
    return out + [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points if dots]


def training(found: dict[str, Any], left: int) -> list[str]:
    """The loss: cuDNN's as a line, every tenth of the others as dots on it (the parallel one five steps later)."""
    low, high = 1.8, 2.6
    marks = []
    for name, colour, first in (("cudnn", ORANGE, None), ("scan", GREEN, 0), ("parallel", PURPLE, 5)):
        losses = found["curves"][name]
        points = [
            (left + 340 * i / len(losses), 340 - 290 * (min(max(loss, low), high) - low) / (high - low))
            for i, loss in enumerate(losses)
        ]
        marks += line(points if first is None else points[first::10], colour, first is not None)
    title = f"loss while training, Adam {found['lr']:g}, T = {found['setting']['steps']:,}"
    return chart(left, title, "step", [0, 100, 200, 300], [1.8, 2.0, 2.2, 2.4, 2.6], marks)


def speed(rows: list[dict[str, Any]], left: int) -> list[str]:
    """How many times faster than cuDNN's the backward pass of the RNN is, over its length."""
    marks = []
    for ending, colour in (("_device_ms", GREEN), ("_ms", PURPLE)):
        points = []
        for row in rows:
            setting = row["setting"]
            if (setting["cell"], setting["batch"], setting["hidden"], setting["every_step"]) == ("RNN", 16, 20, False):
                ratio = row[f"cudnn_backward{ending}"] / row[f"scan_backward{ending}"]
                points.append(
                    (left + 340 * math.log10(setting["steps"] / 10) / 4, 340 - 290 * (math.log10(ratio) + 1) / 4)
                )
        marks += line(points, colour, False) + line(points, colour, True)
    title = "backward pass, times faster than cuDNN's"
    return chart(left, title, "steps T", [10, 100, 1000, 10000, 100000], [0.1, 1, 10, 100, 1000], marks)


def draw(found: dict[str, Any]) -> str:
    """An SVG."""
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 440" font-family="sans-serif" font-size="12">']
    out.append('<rect width="880" height="440" fill="white"/>')
    curve = max(found["training"], key=lambda t: t["lr"])
    out += training(curve, 60) + speed(found["rows"], 500)
    for x, colour, words in (
        (60, ORANGE, "cuDNN"), (130, GREEN, "scan"), (190, PURPLE, "scan, parallel forward"),
        (500, GREEN, "busy time of the device"), (690, PURPLE, "on the clock"),
    ):  # fmt: skip
        out.append(f'<circle cx="{x}" cy="412" r="4" fill="{colour}"/><text x="{x + 9}" y="416">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(json.loads(Path(sys.argv[2]).read_text())))
