"""The picture of a run: hours against GPUs, both logarithmic, with the reported times in red."""

from __future__ import annotations

import math
from typing import Any

DEPTHS = (2, 4, 8)
SHOWN = (("MP", "model_parallel"), ("GEMS", "gems"))
COLOURS = {2: "#1b9e77", 4: "#d95f02", 8: "#7570b3"}


def line(data: dict[str, Any], depth: int, schedule: str) -> dict[int, dict[str, Any]]:
    return {r["gpus"]: r for r in data["simulated"] if (r["stages"], r["schedule"]) == (depth, schedule)}


def draw(data: dict[str, Any]) -> str:
    """An SVG."""

    def at(gpus: float, hours: float) -> tuple[float, float]:
        return 80 + 520 * math.log(gpus / 4) / math.log(32), 40 + 380 * math.log(10 / hours) / math.log(200)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    reported = data["reported"]
    end = 'text-anchor="end"'
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 480" font-family="sans-serif" font-size="12">']
    out.append('<rect width="780" height="480" fill="white"/>')
    for gpus in (4, 8, 16, 32, 64, 128):
        x = at(gpus, 1)[0]
        out += [f'<path d="M{x:.0f} 40V420" stroke="#e5e5e5"/>', text(x, 438, str(gpus), 'text-anchor="middle"')]
    for hours in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05):
        y = at(4, hours)[1]
        out += [f'<path d="M80 {y:.0f}H600" stroke="#e5e5e5"/>', text(72, y + 4, f"{hours:g}", end)]
    out.append(text(340, 464, "V100 GPUs", 'text-anchor="middle"'))
    out.append(text(0, 0, "hours", 'transform="translate(28 230) rotate(-90)" text-anchor="middle"'))
    out.append(text(80, 24, "ResNet-110-v2, 1024 x 1024 tiles: simulated, calibrated to 7.25 h", 'font-size="14"'))
    drawn = [(f"{d} stages, {s}", COLOURS[d], s, line(data, d, k)) for d in DEPTHS for s, k in SHOWN]
    drawn.append(("planner's choice", "#000", "", {r["gpus"]: r for r in data["planned"]}))
    for i, (name, colour, kind, rows) in enumerate(drawn):
        dash = ' stroke-dasharray="5 4"' if kind == "GEMS" else ""
        points = " ".join("{:.1f},{:.1f}".format(*at(g, r["hours"])) for g, r in rows.items())
        style = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
        out += [f'<polyline points="{points}" {style}/>', f'<path d="M614 {60 + 22 * i}h28" {style}/>']
        out.append(text(650, 64 + 22 * i, name))
    y, (x, there) = at(4, reported["baseline_h"])[1], at(reported["gpus"], reported["hours"])
    out += [f'<path d="M80 {y:.0f}H600" stroke="#c00" stroke-dasharray="2 3"/>']
    out += [text(596, y - 5, "reported: 7.25 h, number of GPUs not stated", f'{end} fill="#c00"')]
    out += [f'<circle cx="{x:.0f}" cy="{there:.0f}" r="5" fill="#c00"/>']
    out += [text(x + 10, there + 4, "reported: 28 min", 'fill="#c00"')]
    return "\n".join([*out, "</svg>"]) + "\n"
