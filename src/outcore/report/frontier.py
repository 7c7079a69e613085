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
.line{fill:none;stroke:#4d82b5;stroke-width:2}.point{fill:#4d82b5}.plain{fill:#cc8637}.chosen{fill:#b03a5b}
.over{paint-order:stroke;stroke:#ffffff;stroke-width:4px;stroke-linejoin:round}
.budget{stroke:#c05a79;stroke-dasharray:4 3}
"""


def policy_counts(keeping: Keeping, one: Assignment) -> str:
    """How many buffers have which policy."""
    counts = Counter(how.partition(":")[0] for how in keeping.resolved(one.policy).values())
    names = {"keep": "hold"}
    return ", ".join(f"{names.get(how, how)} {count}" for how, count in sorted(counts.items())) or "nothing"


def frontier_table(keeping: Keeping, found: Sequence[Assignment], chosen: Assignment | None = None) -> Table:
    """A row per assignment; the plan's own is marked."""
    table = Table(title="time against memory (predicted)", title_justify="left", box=None, pad_edge=False)
    for name in ("peak", "of plain", "step", "of plain", ""):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("pieces of memory, by what is done with them")
    most = max(a.outcome.time_s for a in found)
    if found[0].outcome.peak_bytes < keeping.plain.peak_bytes:  # something smaller is as fast
        plain = format_bytes(keeping.plain.peak_bytes), "1.00", f"{keeping.plain_s * 1e3:,.1f} ms", "1.000x"
        table.add_row(*plain, "█" * round(16 * keeping.plain_s / most), "plain training: all are kept")
    for one in found:
        time_s, peak = one.outcome.time_s, one.outcome.peak_bytes
        table.add_row(
            format_bytes(peak),
            f"{peak / keeping.plain.peak_bytes:.2f}",
            f"{time_s * 1e3:,.1f} ms",
            f"{time_s / keeping.plain_s:.3f}x" if keeping.plain_s else "",
            "█" * round(16 * time_s / most),
            policy_counts(keeping, one) + (" (this plan)" if one is chosen else ""),
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


def frontier_svg(
    keeping: Keeping,
    found: Sequence[Assignment],
    *,
    name: str,
    budget_bytes: int | None = None,
    chosen: Assignment | None = None,
) -> str:
    """The curve: peak memory to the right, time over plain upwards; plain training and the plan are marked."""
    plain = (keeping.plain.peak_bytes / 2**30, 1.0)
    axes = _Axes(1.08 * plain[0], max(1.1, *(_over_plain(keeping, a) for a in found)) * 1.02)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text class="title" x="8" y="18">{escape(name)}: time of a step against its memory</text>',
        f'<text class="small" x="8" y="34">plain: {format_bytes(keeping.plain.peak_bytes)}, '
        f"{keeping.plain_s * 1e3:,.1f} ms (predicted)</text>",
        *axes.drawn(),
    ]
    if budget_bytes is not None and budget_bytes / 2**30 <= axes.right:
        out += axes.mark(budget_bytes / 2**30, f"budget {format_bytes(budget_bytes)}", _TOP + 12)
    out += axes.mark(keeping.floor[0] / 2**30, "one operation alone needs this", _TOP + axes.tall - 8)
    points = [(a.outcome.peak_bytes / 2**30, _over_plain(keeping, a)) for a in found]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (axes.at(*p) for p in points))
    out.append(f'<polyline class="line" points="{path}"/>')
    for one, point in zip(found, points, strict=True):
        title = f"{format_bytes(one.outcome.peak_bytes)}, {point[1]:.3f}x: {policy_counts(keeping, one)}"
        out += axes.point(point, "chosen" if one is chosen else "point", title)
    out += [*axes.point(plain, "plain", "plain training"), axes.label(plain, "plain", -10)]
    if chosen is not None:
        where = (chosen.outcome.peak_bytes / 2**30, _over_plain(keeping, chosen))
        out += [*axes.point(where, "chosen", "this plan"), axes.label(where, f"this plan, {where[1]:.2f}x", -10)]
    return "\n".join([*out, "</svg>"]) + "\n"


def _over_plain(keeping: Keeping, one: Assignment) -> float:
    return one.outcome.time_s / max(keeping.plain_s, 1e-12)


class _Axes:
    """Where things are on the picture: GiB from nothing to `right`, time over plain from one to `high`."""

    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def __init__(self, right: float, high: float) -> None:
        self.right, self.high = right, high

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A point."""
        return _LEFT + self.wide * x / self.right, _TOP + self.tall * (self.high - y) / (self.high - 1.0)

    def drawn(self) -> list[str]:
        """Grid, numbers and names."""
        out, below, middle = [], _TOP + self.tall, _TOP + self.tall / 2
        for x in _round_steps(0.0, self.right):
            px, _ = self.at(x, 1.0)
            out += [
                f'<line class="grid" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{below}"/>',
                f'<text class="small" x="{px:.1f}" y="{below + 16}" text-anchor="middle">{x:g}</text>',
            ]
        for y in _round_steps(1.0, self.high):
            _, py = self.at(0.0, y)
            out += [
                f'<line class="grid" x1="{_LEFT}" y1="{py:.1f}" x2="{_LEFT + self.wide}" y2="{py:.1f}"/>',
                f'<text class="small" x="{_LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}x</text>',
            ]
        return [
            *out,
            f'<text x="{_LEFT + self.wide / 2}" y="{_HEIGHT - 12}" text-anchor="middle">peak memory (GiB)</text>',
            f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">'
            "time of a step, over plain</text>",
        ]

    def mark(self, x: float, label: str, height: float) -> list[str]:
        """An upright line."""
        px, _ = self.at(x, 1.0)
        side, gap = ("end", -4) if px > _LEFT + self.wide / 2 else ("start", 4)
        return [
            f'<line class="budget" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{_TOP + self.tall}"/>',
            f'<text class="small over" x="{px + gap:.1f}" y="{height}" text-anchor="{side}">{label}</text>',
        ]

    def point(self, point: tuple[float, float], kind: str, title: str) -> list[str]:
        """A dot that says what it is when it is pointed at."""
        px, py = self.at(*point)
        size = 4 if kind == "point" else 6
        return [
            f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="{size}"><title>{escape(title)}</title></circle>'
        ]

    def label(self, point: tuple[float, float], text: str, rise: float) -> str:
        """Words at a point."""
        px, py = self.at(*point)
        side, gap = ("end", -8) if px > _LEFT + 0.75 * self.wide else ("start", 8)
        return f'<text class="over" x="{px + gap:.1f}" y="{py + rise:.1f}" text-anchor="{side}">{escape(text)}</text>'


def _round_steps(low: float, high: float) -> list[float]:
    """Round numbers between two, four to eight of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= max((m for m in (1, 2, 2.5, 5) if (high - low) / (m * step) >= 4), default=1)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]
