"""A graph from left to right, and an encoder-decoder as a U: the forms in which papers draw networks.

`svg` draws from top to bottom, any depth, any wiring. A page is wider than high, and two kinds of networks have a form
that everybody knows: a chain of blocks in one line, and the U, whose left arm goes down in resolution and whose right
arm comes up, level beside level, with the skips straight across. Both show one level of detail, modules only.

The level of a block in the U is the number of nested skips around it, as in `outcore.planner.pipeline.fold_unet`. What
lies between the ends of the innermost skip is the bottom.

Blocks may be shaded by a number, time or memory: the darker the more, with the scale below the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outcore.errors import OutcoreError
from outcore.figure import SMALL, WIDE, document, text
from outcore.graph.graph import Graph
from outcore.graph.view import View
from outcore.report.graph_drawing.labels import count, kind_of, shape_label, text_width
from outcore.report.graph_drawing.shading import Shading
from outcore.report.graph_drawing.svg import COLOURS, LEGEND

__all__ = ["landscape", "u_shape"]

_HIGH, _GAP, _NEAR, _ROW, _PAD = 44.0, 58.0, 24.0, 92.0, 26.0
_INK, _SKIP = "#59646e", "#0072b2"


@dataclass
class _Sheet:
    """A drawing in progress: where every block lies, and what is drawn so far."""

    graph: Graph
    view: View
    shading: Shading | None
    place: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Left and top of every block."""
    out: list[str] = field(default_factory=list)

    def width(self, name: str) -> float:
        """Of a block: as wide as its words."""
        title, note = self._words(name)
        return max(64.0, text_width(title, 13, bold=True) + 18, text_width(note, SMALL) + 14)

    def sides(self, name: str) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of a block."""
        x, y = self.place[name]
        return x, y, x + self.width(name), y + _HIGH

    def label(self, source: str, target: str) -> str:
        """The shape of what flows between two blocks."""
        values = [self.graph.values[v] for v in self.view.edges[source, target]]
        batch = self.graph.values[self.graph.inputs[0]].shape[0] if self.graph.inputs else None
        return shape_label(values[0].shape, batch) if values else ""

    def boxes(self) -> list[str]:
        """All blocks."""
        drawn = []
        for name, box in self.view.boxes.items():
            x, y, right, _ = self.sides(name)
            fill, border = COLOURS[self._kind(name)]
            if self.shading is not None:
                fill, border = self.shading.colour(box.block), _INK
            ink = "#ffffff" if self.shading is not None and self.shading.is_dark(box.block) else ""
            title, note = self._words(name)
            shape = f'x="{x:.1f}" y="{y:.1f}" width="{right - x:.1f}" height="{_HIGH:g}" rx="4"'
            drawn.append(f'<rect {shape} fill="{fill}" stroke="{border}"/>')
            for words, at, kind in ((title, y + 19, "title"), (note, y + 35, "small")):
                style = f' style="fill:{ink}"' if ink else ""
                drawn.append(text((x + right) / 2, at, words, f"middle {kind}").replace("<text", f"<text{style}", 1))
        return drawn

    def arrow(self, points: Sequence[tuple[float, float]], colour: str = _INK) -> None:
        """A line through points, with a head at its end."""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        wing = f"M{x1:.1f} {y1:.1f}l{-8 * dx - 4 * dy} {-8 * dy - 4 * dx}l{8 * dy} {8 * dx}z"
        self.out.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        self.out.append(f'<path d="{wing}" fill="{colour}"/>')

    def words(self, x: float, y: float, said: str, classes: str = "small middle quiet over") -> None:
        """Words beside a line."""
        self.out.append(text(x, y, said, classes))

    def finished(self, title: str | None) -> str:
        """The picture with its title and legend."""
        right = max(self.sides(name)[2] for name in self.place)
        bottom = max(self.sides(name)[3] for name in self.place) + 18
        width, keys = max(right + _PAD, 360.0), self._keys(bottom + 18, max(right, 340.0))
        head = [text(width / 2, 20, title, "title middle")] if title else []
        return document(width, bottom + 18 + keys[1], [*head, *self.out, *self.boxes(), *keys[0]])

    def _keys(self, top: float, room: float) -> tuple[list[str], float]:
        if self.shading is not None:
            return self.shading.scale(_PAD, top), 34
        kinds = {self._kind(name) for name in self.view.boxes}
        drawn, x, y = [], _PAD, top
        for kind in (k for k in COLOURS if k in kinds):
            fill, border = COLOURS[kind]
            needed = WIDE * SMALL * len(LEGEND[kind]) + 38
            if x > _PAD and x + needed > room:
                x, y = _PAD, y + 18
            box = f'x="{x:.1f}" y="{y:.1f}" width="14" height="11" rx="2" fill="{fill}" stroke="{border}"'
            drawn += [f"<rect {box}/>", text(x + 20, y + 10, LEGEND[kind], "small")]
            x += needed
        return drawn, y - top + 22

    def _kind(self, name: str) -> str:
        box = self.view.boxes[name]
        return "container" if box.kind == "container" else kind_of(self.graph.blocks[box.block].type)

    def _words(self, name: str) -> tuple[str, str]:
        block = self.graph.blocks[self.view.boxes[name].block]
        call = name.rpartition("#")[2]
        title = block.path if block.calls <= 1 else f"{block.path}#{call}"
        size = f"{count(block.parameters)} params" if block.parameters else ""
        return title, size or block.type


def landscape(
    graph: Graph, *, depth: int = 1, title: str | None = None, shade: Mapping[str, float] | None = None, unit: str = ""
) -> str:
    """Draw a graph from left to right as SVG; connections that pass blocks by run above them.

    Args:
        graph: the network.
        depth: 1 shows the model's own children, 2 theirs.
        title: text above the picture.
        shade: a number for every block, by its path, that its colour shows.
        unit: what that number is, with its unit.
    """
    view = graph.view(depth, functions=False)
    sheet = _Sheet(graph, view, Shading(shade, unit) if shade is not None else None)
    layers = _layers(view)
    columns = [[n for n, layer in layers.items() if layer == i] for i in range(max(layers.values(), default=0) + 1)]
    long = [(a, b) for a, b in view.edges if layers[b] > layers[a] + 1]
    tracks = _tracks([(layers[a], layers[b]) for a, b in long])
    tallest = max(map(len, columns), default=1)
    top = (36.0 if title else 16.0) + 22 * (max(tracks, default=-1) + 1) + 10
    x = _PAD
    for column in columns:
        wide = max(map(sheet.width, column))
        shapes = [text_width(sheet.label(a, b), SMALL) for a, b in view.edges if a in column]
        wide = max([wide, *(width + 4 - _NEAR for width in shapes)])
        for i, name in enumerate(column):
            middle = top + (tallest * (_HIGH + 22) - 22) / 2
            y = middle + (i - (len(column) - 1) / 2) * (_HIGH + 22) - _HIGH / 2
            sheet.place[name] = x + (wide - sheet.width(name)) / 2, y
        x += wide + _NEAR
    made = {a: sheet.label(a, b) for a, b in view.edges}
    for a, b in view.edges:
        if (a, b) not in long:
            _, ay, ax, _ = sheet.sides(a)
            bx, by, _, _ = sheet.sides(b)
            middle = (ax + bx) / 2
            points = [(ax, ay + _HIGH / 2), (middle, ay + _HIGH / 2), (middle, by + _HIGH / 2), (bx, by + _HIGH / 2)]
            sheet.arrow(points if ay != by else [points[0], points[-1]])
    for name, words in made.items():
        left, _, right, below = sheet.sides(name)
        sheet.words((left + right) / 2, below + 14, words)
    for (a, b), track in zip(long, tracks, strict=True):
        left, ay, right, _ = sheet.sides(a)
        bx, by, _, _ = sheet.sides(b)
        up, start, end = top - 12 - 22 * track, right - (right - left) / 4, bx + 14
        sheet.arrow([(start, ay), (start, up), (end, up), (end, by)], _SKIP)
    return sheet.finished(title)


def u_shape(
    graph: Graph, *, depth: int = 1, title: str | None = None, shade: Mapping[str, float] | None = None, unit: str = ""
) -> str:
    """Draw an encoder-decoder as a U, as SVG.

    Args:
        graph: the network; at this depth its skips must lie inside each other.
        depth: 1 shows the model's own children, 2 theirs.
        title: text above the picture.
        shade: a number for every block, by its path, that its colour shows.
        unit: what that number is, with its unit.

    Raises:
        OutcoreError: there are no two skips one inside the other.
    """
    view = graph.view(depth, functions=False)
    names = list(view.boxes)
    levels = nested_skips(view)
    if len(levels) < 2:
        raise OutcoreError(
            f"{graph.root.type} has no two skips inside each other at depth {depth}, so it is no U; try another "
            "--depth, or --form landscape"
        )
    sheet = _Sheet(graph, view, Shading(shade, unit) if shade is not None else None)
    inner = levels[-1]
    arms: list[dict[int, list[str]]] = [{}, {}, {}]
    for i, name in enumerate(names):
        level = sum(a < i < b for a, b in levels)
        arms[0 if i <= inner[0] else 1 if i < inner[1] else 2].setdefault(level, []).append(name)
    top, step = 46.0 if title else 26.0, _GAP * 0.55

    def wide(row: list[str]) -> float:
        return sum(map(sheet.width, row)) + 30 * (len(row) - 1)

    left = max((wide(row) + step * level for level, row in arms[0].items()), default=0.0)
    bottom = max((wide(row) for row in arms[1].values()), default=60.0)
    for level, row in arms[0].items():
        _row(sheet, row, _PAD + step * level, top + _ROW * level)
    for level, row in arms[1].items():
        _row(sheet, row, _PAD + left + 40, top + _ROW * level)
    deepest = max(arms[2], default=0)
    for level, row in arms[2].items():
        _row(sheet, row, _PAD + left + bottom + 80 + step * (deepest - level), top + _ROW * level)
    skips = {(names[a], names[b]) for a, b in levels}
    for a, b in view.edges:
        _join(sheet, a, b, (a, b) in skips)
    return sheet.finished(title)


def nested_skips(view: View) -> list[tuple[int, int]]:
    """Skips that lie inside each other, the outermost first: positions of the block each leaves and the one it reaches.

    Of all skips the longest chain of them is taken.
    """
    order = {name: i for i, name in enumerate(view.boxes)}
    found = sorted({(order[a], order[b]) for a, b in view.edges if order[b] > order[a] + 1})
    best: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for skip in sorted(found, key=lambda s: s[1] - s[0]):
        inside = [best[s] for s in best if skip[0] < s[0] and s[1] < skip[1]]
        best[skip] = [skip, *max(inside, key=len, default=[])]
    return max(best.values(), key=len, default=[])


def _row(sheet: _Sheet, row: list[str], x: float, y: float) -> None:
    for name in row:
        sheet.place[name] = x, y
        x += sheet.width(name) + 30


def _join(sheet: _Sheet, a: str, b: str, skip: bool) -> None:
    """An arrow between two blocks of the U: across, down, or up."""
    ax0, ay, ax1, abelow = sheet.sides(a)
    bx0, by, bx1, bbelow = sheet.sides(b)
    if ay == by:
        sheet.arrow([(ax1, ay + _HIGH / 2), (bx0, by + _HIGH / 2)], _SKIP if skip else _INK)
        if skip or bx0 - ax1 > 60:
            sheet.words((ax1 + bx0) / 2, ay + _HIGH / 2 - 6, sheet.label(a, b))
    elif by > ay:
        x = min(max((ax0 + ax1) / 2, bx0 + 12), bx1 - 12)
        beside = not ax0 <= x <= ax1
        sheet.arrow([(ax1, ay + 30), (x, ay + 30), (x, by)] if beside else [(x, abelow), (x, by)])
        side = (x - 6, "small quiet over end") if beside else (x + 6, "small quiet over")  # the way up is on the right
        sheet.words(side[0], (abelow + by) / 2 + 4, sheet.label(a, b), side[1])
    else:
        x = min(max((bx0 + bx1) / 2, ax0 + 12), ax1 - 12)
        points = [(x, ay), (x, bbelow)] if bx0 <= x <= bx1 else [(x, ay), (x, by + 30), (bx0, by + 30)]
        sheet.arrow(points)
        sheet.words(x + 6, (ay + bbelow) / 2 + 4, sheet.label(a, b), "small quiet over")


def _layers(view: View) -> dict[str, int]:
    """The column of every block: one behind the last block it reads."""
    found: dict[str, int] = {}
    before = view.adjacency("inputs")
    for name in view.boxes:
        found[name] = max((found[b] + 1 for b in before[name] if b in found), default=0)
    return found


def _tracks(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Heights at which lines run so that none lies on another: the shortest lowest."""
    tracks = [0] * len(spans)
    taken: list[tuple[int, int, int]] = []
    for i in sorted(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0]):
        a, b = spans[i]
        track = 0
        while any(t == track and a <= d and c <= b for c, d, t in taken):
            track += 1
        tracks[i] = track
        taken.append((a, b, track))
    return tracks
