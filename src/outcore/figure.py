"""One style for every picture with axes: fonts, colours, ticks, legends.

A figure goes into a paper at column width, in print, before readers some of whom do not tell red from green. So: one
font, text that is still read at half the size; the colours of Okabe and Ito (Color Universal Design, 2008), each of
which means one thing in a figure; axes that name what they show and its unit; a legend for every colour that is used,
and no colour twice in it. Units are chosen once for an axis, by its largest value.

A picture is plain SVG text without a script, put together from the strings that the functions here return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "yellow": "#f0e442",
    "grey": "#9aa5ae",
    "light": "#e3e7ea",
    "ink": "#1f2830",
}
DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 2 2 2 2 2", "12 6")
"""How lines that may lie on each other are broken, so that what is below shows through."""
FONT = "Helvetica,Arial,'Liberation Sans',sans-serif"
SIZE, SMALL = 13, 11.5
WIDE = 0.56
"""Mean width of a character over its size."""


@dataclass(frozen=True, slots=True)
class Span:
    """What an axis shows: from one value to another, under a name with its unit."""

    low: float
    high: float
    name: str
    log: bool = False
    at: tuple[float, ...] = ()
    """Where its numbers stand; round numbers if none are given."""

    def share(self, value: float) -> float:
        """How far along the axis a value lies: 0 at its beginning, 1 at its end."""
        if self.log:
            low, high, value = (math.log(max(v, 1e-300)) for v in (self.low, self.high, value))
            return (value - low) / ((high - low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers along it, or those that were given."""
        if self.at:
            return list(self.at)
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = [10.0**p * m for p in powers for m in ((1, 2, 5) if len(powers) < 4 else (1,))]
            return [v for v in few if self.low <= v <= self.high * (1 + 1e-9)]
        step = _round((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        return [round(step * k, 12) for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Axes:
    """A rectangle in which values have places."""

    left: float
    top: float
    width: float
    height: float
    x: Span
    y: Span

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point."""
        return self.left + self.width * self.x.share(x), self.top + self.height * (1 - self.y.share(y))

    def drawn(self, *, grid: bool = True) -> list[str]:
        """Grid, ticks, and the names of both axes."""
        below, out = self.top + self.height, []
        for value in self.x.ticks():
            px = self.left + self.width * self.x.share(value)
            out += [line(px, self.top, px, below, "grid")] if grid else []
            out += [line(px, below, px, below + 4, "axis"), text(px, below + 17, number(value), "tick middle")]
        for value in self.y.ticks():
            py = below - self.height * self.y.share(value)
            out += [line(self.left, py, self.left + self.width, py, "grid")] if grid else []
            out += [line(self.left - 4, py, self.left, py, "axis")]
            out += [text(self.left - 7, py + 4, number(value), "tick end")]
        middle = self.top + self.height / 2
        return [
            *out,
            line(self.left, below, self.left + self.width, below, "axis"),
            line(self.left, self.top, self.left, below, "axis"),
            text(self.left + self.width / 2, below + 36, self.x.name, "middle"),
            f'<g transform="rotate(-90 15 {middle:.1f})">{text(15, middle, self.y.name, "middle")}</g>',
        ]

    def path(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 2,
        hint: str = "",
        dash: str = "",
    ) -> str:
        """A line through points; unbroken, or with dashes and gaps of these lengths.

        What lies above the upper edge is left out: the line leaves the picture where it crosses the edge, and comes
        back where it crosses it again.
        """
        style = f'fill="none" stroke="{COLOURS[colour]}" stroke-width="{width:g}" stroke-linejoin="round"'
        style += f' stroke-dasharray="{dash}"' if dash else ""
        drawn = []
        for part in _below([self.at(*p) for p in points], self.top):
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in part)
            drawn.append(f'<polyline {style} points="{places}">{_hint(hint)}</polyline>')
        return "".join(drawn)

    def point(self, x: float, y: float, colour: str, *, size: float = 4, hint: str = "") -> str:
        """A dot."""
        px, py = self.at(x, y)
        circle = f'cx="{px:.1f}" cy="{py:.1f}" r="{size:g}" fill="{COLOURS[colour]}"'
        return f'<circle {circle} stroke="#ffffff">{_hint(hint)}</circle>'


def _below(places: Sequence[tuple[float, float]], top: float) -> list[list[tuple[float, float]]]:
    """The parts of a line that do not lie above an edge; downwards, numbers grow.

    >>> _below([(0, 9), (1, 5), (2, -5), (3, 5)], 0)
    [[(0, 9), (1, 5), (1.5, 0)], [(2.5, 0), (3, 5)]]
    """
    parts: list[list[tuple[float, float]]] = []
    before: tuple[float, float] | None = None
    for x, y in places:
        if before is not None and (before[1] < top) != (y < top):
            crossing = (before[0] + (x - before[0]) * (top - before[1]) / (y - before[1]), top)
            if y < top:
                parts[-1].append(crossing)
            else:
                parts.append([crossing])
        elif before is None and y >= top:
            parts.append([])
        if y >= top:
            parts[-1].append((x, y))
        before = (x, y)
    return parts


def document(width: float, height: float, body: Sequence[str]) -> str:
    """A whole picture."""
    style = (
        f"text{{font-family:{FONT};font-size:{SIZE}px;fill:{COLOURS['ink']}}}"
        f".title{{font-weight:bold}}.small,.tick{{font-size:{SMALL}px}}.quiet{{fill:#59646e}}"
        ".middle{text-anchor:middle}.end{text-anchor:end}.grid{stroke:#e3e7ea}.axis{stroke:#59646e}"
        f".limit{{stroke:{COLOURS['vermillion']};stroke-dasharray:5 3;stroke-width:1.4}}"
        f".least{{stroke:{COLOURS['purple']};stroke-dasharray:2 3;stroke-width:1.4}}"
        ".over{paint-order:stroke;stroke:#ffffff;stroke-width:4px;stroke-linejoin:round}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}">\n<style>{style}</style>\n<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """Words at a place."""
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    """A straight line."""
    return f'<line class="{classes}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    """A filled rectangle; a colour by name or as it is."""
    fill = COLOURS.get(colour, colour)
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{height:g}" fill="{fill}"'
    return f'<rect {box} stroke="#ffffff" stroke-width="0.6">{_hint(hint)}</rect>'


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, room: float) -> tuple[list[str], float]:
    """Swatches with what their colours mean, in columns if one row is too short; the drawing, and its lower end."""
    needed = [20 + WIDE * SMALL * len(words) + 16 for _, words in entries]
    out, left, column = [], x, 0.0
    if sum(needed) - 16 > room:
        column = room / max(1, int(room // max(needed)))
    for (colour, words), own in zip(entries, needed, strict=True):
        if left > x and left + own - 16 > x + room + 0.5:
            left, y = x, y + 18
        out += [rectangle(left, y - 10, 13, 11, colour), text(left + 18, y, words, "small")]
        left += max(own, column)
    return out, y + 8


def bytes_unit(most: float) -> tuple[float, str]:
    """What to divide bytes by so that the largest is a number people read, and the unit that gives."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most >= 0.8 * 2**power:
            return 2.0**power, unit
    return 1.0, "bytes"


def time_unit(most_s: float) -> tuple[float, str]:
    """What to divide seconds by, and the unit that gives."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if most_s >= 0.8 * factor:
            return factor, unit
    return 1e-9, "ns"


def number(value: float) -> str:
    """A tick's number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _round(step: float) -> float:
    """The next larger of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999)


def _hint(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
