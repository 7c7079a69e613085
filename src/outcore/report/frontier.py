"""The frontier of time against memory, as a table for a terminal and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.table import Table

from outcore.machine.units import format_bytes
from outcore.planner.budget import Assignment
from outcore.planner.keeping import Keeping

__all__ = ["frontier_json", "frontier_svg", "frontier_table"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 380, 70, 50, 46, 24
_STYLE = """
text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2830}.title{font-size:13px;font-weight:bold}
.small{font-size:10px;fill:#66717b}.axis{stroke:#87929a;stroke-width:1}.grid{stroke:#e6eaed;stroke-width:1}
.line{fill:none;stroke:#4d82b5;stroke-width:2}.point{fill:#4d82b5}.plain{fill:#cc8637}
.budget{stroke:#c05a79;stroke-dasharray:4 3}
"""


def policy_counts(keeping: Keeping, one: Assignment) -> str:
    """How many buffers have which policy."""
    counts = Counter(how.partition(":")[0] for how in keeping.resolved(one.policy).values())
    names = {"keep": "hold"}
    return ", ".join(f"{names.get(how, how)} {count}" for how, count in sorted(counts.items())) or "nothing"


def frontier_table(keeping: Keeping, found: Sequence[Assignment]) -> Table:
    """A row per assignment."""
    table = Table(title="time against memory (predicted)", title_justify="left", box=None, pad_edge=False)
    for name in ("peak", "of plain", "step", "of plain", ""):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("what is done")
    most = max(a.outcome.time_s for a in found)
    for one in found:
        time_s, peak = one.outcome.time_s, one.outcome.peak_bytes
        table.add_row(
            format_bytes(peak),
            f"{peak / keeping.plain.peak_bytes:.2f}",
            f"{time_s * 1e3:,.1f} ms",
            f"{time_s / keeping.plain_s:.3f}x" if keeping.plain_s else "",
            "█" * round(16 * time_s / most),
            policy_counts(keeping, one),
        )
    return table


def frontier_json(keeping: Keeping, found: Sequence[Assignment]) -> list[dict[str, object]]:
    """Plain values."""
    return [
        {
            "peak_bytes": one.outcome.peak_bytes,
            "time_s": one.outcome.time_s,
            "over_plain": one.outcome.time_s / keeping.plain_s if keeping.plain_s else 1.0,
            "policy": keeping.resolved(one.policy),
        }
        for one in found
    ]


def frontier_svg(keeping: Keeping, found: Sequence[Assignment], *, name: str, budget_bytes: int | None = None) -> str:
    """The curve: peak memory to the right, time over plain upwards."""
    points = [(a.outcome.peak_bytes / 2**30, a.outcome.time_s / max(keeping.plain_s, 1e-12)) for a in found]
    right = 1.05 * max(x for x, _ in points)
    low, high = 1.0, max(1.1, *(y for _, y in points)) * 1.02
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * x / right, _TOP + tall * (1 - (y - low) / (high - low))

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text class="title" x="8" y="18">{escape(name)}: a step within a budget</text>',
        f'<text class="small" x="8" y="34">plain: {format_bytes(keeping.plain.peak_bytes)}, '
        f"{keeping.plain_s * 1e3:,.1f} ms (predicted)</text>",
    ]
    for x in _round_steps(0.0, right):
        px, _ = at(x, low)
        out += [
            f'<line class="grid" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{_TOP + tall}"/>',
            f'<text class="small" x="{px:.1f}" y="{_TOP + tall + 16}" text-anchor="middle">{x:g}</text>',
        ]
    for y in _round_steps(low, high):
        _, py = at(0.0, y)
        out += [
            f'<line class="grid" x1="{_LEFT}" y1="{py:.1f}" x2="{_LEFT + wide}" y2="{py:.1f}"/>',
            f'<text class="small" x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:.2f}x</text>',
        ]
    marks = [(keeping.floor[0], "floor of one operation", _TOP + tall - 8)]
    if budget_bytes is not None:
        marks.append((budget_bytes, f"budget {format_bytes(budget_bytes)}", _TOP + 12))
    for size, label, height in marks:
        px, _ = at(size / 2**30, low)
        side, gap = ("end", -4) if px > _LEFT + wide / 2 else ("start", 4)
        out += [
            f'<line class="budget" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{_TOP + tall}"/>',
            f'<text class="small" x="{px + gap:.1f}" y="{height}" text-anchor="{side}">{label}</text>',
        ]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in points))
    out.append(f'<polyline class="line" points="{path}"/>')
    for i, (one, point) in enumerate(zip(found, points, strict=True)):
        px, py = at(*point)
        title = f"{format_bytes(one.outcome.peak_bytes)}, {point[1]:.3f}x: {policy_counts(keeping, one)}"
        kind = "plain" if i == 0 else "point"
        out.append(f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{escape(title)}</title></circle>')
    middle = _LEFT + wide / 2
    out.append(f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">peak memory (GiB)</text>')
    out.append(f'<text x="14" y="{_TOP + tall / 2}" transform="rotate(-90 14 {_TOP + tall / 2})" text-anchor="middle">')
    return "\n".join([*out, "step over plain</text>", "</svg>"]) + "\n"


def _round_steps(low: float, high: float) -> list[float]:
    """Round numbers between two, four to eight of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= max((m for m in (1, 2, 2.5, 5) if (high - low) / (m * step) >= 4), default=1)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
