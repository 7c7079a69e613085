"""Time against memory of every case, as an SVG: a panel for each network and precision."""

from __future__ import annotations

from networks import NAMES
from rows import Found, Key, Point

COLOURS = {
    "ours, bitwise": "#1f77b4",
    "ours, reassociated": "#2ca02c",
    "checkpoint per block": "#d95f02",
    "fairscale offload": "#e6ab02",
    "save_on_cpu": "#8c564b",
    "compile, budget 0.5": "#9467bd",
}
SHOWN = {
    "resnet50": "ResNet-50",
    "vgg19": "VGG-19",
    "inception_v3": "Inception-v3",
    "densenet121": "DenseNet-121",
    "unet": "U-Net",
    "convnext_tiny": "ConvNeXt-T",
}
WIDE, TALL, LEFT, TOP, GAP = 190, 150, 46, 64, 34
RANGE = {"1x4096": (0.5, 2.0), "32x224": (0.0, 3.0)}
"""Of the time axis; what takes longer stands at the upper edge, with its figure."""


def kind_of(point: Point) -> str:
    """Its colour's name."""
    if point.ours:
        return "ours, reassociated" if point.reassociated else "ours, bitwise"
    return "compile, budget 0.5" if point.how.startswith("compile") else point.how


def beats(one: Point, other: Point) -> bool:
    """Whether a point is neither slower nor larger than another, and not the same."""
    return one is not other and one.slower <= other.slower and one.share <= other.share


def picture(cases: dict[Key, Found], size: str, title: str) -> str:
    """All panels of one size."""
    width = LEFT + len(NAMES) * (WIDE + GAP)
    height = TOP + 2 * (TALL + GAP + 14) + 6
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font-family:Helvetica,Arial,sans-serif;font-size:10px;fill:#1f2830}.title{font-size:14px;"
        "font-weight:bold}.name{font-size:11px;font-weight:bold}.small{font-size:9px;fill:#66717b}"
        ".grid{stroke:#e6eaed}.one{stroke:#aab3ba;stroke-dasharray:3 2}.frame{fill:none;stroke:#87929a}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text class="title" x="{LEFT}" y="20">{title}</text>',
    ]
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 5 + 150 * i
        out.append(f'<circle cx="{x}" cy="38" r="4" fill="{colour}"/><text x="{x + 8}" y="41">{name}</text>')
    for row, precision in enumerate(("tf32", "bf16")):
        for column, name in enumerate(NAMES):
            left, top = LEFT + column * (WIDE + GAP), TOP + row * (TALL + GAP + 14)
            out += _panel(cases.get((name, size, precision)), f"{SHOWN[name]}, {precision}", left, top, *RANGE[size])
    axes = "peak memory over plain to the right, time of a step over plain upwards; the hollow dot is plain"
    out.append(f'<text class="small" x="{LEFT}" y="{height - 10}">{axes}</text>')
    return "\n".join([*out, "</svg>\n"])


def _panel(case: Found | None, name: str, left: int, top: int, low: float, high: float) -> list[str]:
    """One case."""

    def at(share: float, slower: float) -> tuple[float, float]:
        up = (min(max(slower, low), high) - low) / (high - low)
        return left + WIDE * min(share, 1.1) / 1.1, top + TALL * (1 - up)

    out = [f'<text class="name" x="{left}" y="{top - 5}">{name}</text>']
    for tick in (low, 1.0, 0.5 * (1 + high), high):
        _, y = at(0, tick)
        out.append(f'<line class="{"one" if tick == 1 else "grid"}" x1="{left}" x2="{left + WIDE}" y1="{y}" y2="{y}"/>')
        out.append(f'<text class="small" x="{left - 4}" y="{y + 3}" text-anchor="end">{tick:g}x</text>')
    for tick in (0.25, 0.5, 0.75, 1.0):
        x, _ = at(tick, 1)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + TALL}"/>')
        out.append(f'<text class="small" x="{x:.1f}" y="{top + TALL + 11}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<rect class="frame" x="{left}" y="{top}" width="{WIDE}" height="{TALL}"/>')
    if case is None:
        return [*out, f'<text class="small" x="{left + 60}" y="{top + 70}">not run</text>']
    shown = list(case.points.values())
    for kind, colour in COLOURS.items():
        points = sorted((p for p in shown if kind_of(p) == kind), key=lambda p: p.share)
        places = [at(p.share, p.slower) for p in points]
        if kind.startswith("ours"):
            edge = [at(p.share, p.slower) for p in points if not any(beats(q, p) for q in points)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point, (x, y) in zip(points, places, strict=True):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            if point.slower > high:
                out.append(f'<text x="{x + 6:.1f}" y="{y + 10:.1f}" fill="{colour}">{point.slower:.1f}x</text>')
    x, y = at(1, 1)
    out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="white" stroke="#1f2830" stroke-width="1.5"/>')
    return out
