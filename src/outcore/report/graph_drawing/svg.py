"""A graph as a static SVG, for papers and web pages: no script, no outside font, readable in print.

Everything a viewer might restyle has a class (``box convolution``, ``frame``, ``wire skip``, ``shape``); the
few rules at the top of the file are the light theme. Boxes carry the name of their block as a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from outcore.graph.graph import Graph
from outcore.graph.parts import ancestors
from outcore.report.graph_drawing.drawing import Drawing, Placed, WireSegment
from outcore.report.graph_drawing.labels import KINDS, OTHER, count, text_width
from outcore.report.graph_drawing.layout import STRAIGHT, lay_out
from outcore.report.graph_drawing.measured_boxes import BATCH_NOTE, SMALL, TITLE, Sketch, times_width

__all__ = ["COLOURS", "open_parts", "svg"]

COLOURS = {
    "convolution": ("#d8e8f7", "#4d82b5"),
    "norm": ("#e7e1f4", "#8670b5"),
    "activation": ("#fde5cd", "#cc8637"),
    "linear": ("#d8efdb", "#4f985b"),
    "attention": ("#f9d8e1", "#c05a79"),
    "combine": ("#fdf3c0", "#b39a2a"),
    OTHER: ("#eceff1", "#87929a"),
    "container": ("#ffffff", "#4a5560"),
}
"""Fill and border of each kind of box."""
LEGEND = {
    **{kind: kind for kind in KINDS},
    "activation": "activation, pooling",
    OTHER: "other",
    "container": "block",
}

STYLE = f"""
text{{font-family:Helvetica,Arial,sans-serif;font-size:{TITLE:g}px;fill:#1f2830;text-anchor:middle}}
.name{{font-weight:bold}}.left{{text-anchor:start}}.right{{text-anchor:end}}
.small{{font-size:{SMALL:g}px;fill:#4a5560}}.shape{{font-size:{SMALL:g}px;fill:#66717b;text-anchor:start}}
.frame{{fill:#f7f9fa;stroke:#9aa5ae}}.frame.odd{{fill:#eff2f4}}
.end{{fill:#1f2830}}.end+text{{fill:#ffffff;font-size:{SMALL:g}px}}
.wire{{fill:none;stroke:#66717b;stroke-width:1.2}}.tip{{fill:#66717b}}
.wire.skip{{stroke:#3d7ab0}}.tip.skip{{fill:#3d7ab0}}
"""
_GAP = 1.8
"""Half of the room between a name and its type."""


def svg(
    graph: Graph,
    *,
    depth: int | None = 1,
    expand: Iterable[str] = (),
    functions: bool = True,
    fold: bool = True,
    title: str | None = None,
    legend: bool = True,
) -> str:
    """Draw a graph as SVG.

        Path("net.svg").write_text(svg(outcore.capture(model, images), depth=2, expand=["layer4.0"]))

    Args:
        graph: the network.
        depth: 1 shows the model's own children, 2 theirs, None everything.
        expand: blocks opened beyond `depth`, with all blocks around them.
        functions: show all functions; otherwise only those that combine values, such as ``add`` and ``cat``.
        fold: draw identical blocks that follow each other once, as ``Block × 5``.
        title: text above the picture; None for none.
        legend: explain colours and shapes below the picture.
    """
    sketch = Sketch(graph, functions=functions)
    return _Picture(sketch, lay_out(sketch, open_parts(sketch, depth, expand), fold=fold), title, legend).text()


def open_parts(sketch: Sketch, depth: int | None, expand: Iterable[str] = ()) -> set[str]:
    """The containers that are open at a depth, and those opened by name."""
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1 (the model's own children), not {depth}")
    named = set()
    for path in expand:
        named |= {sketch.graph[path].path, *ancestors(path)}
    return {
        part.name
        for part in sketch.nest.containers()
        if depth is None or len(part.around) < depth or part.block in named
    }


class _Picture:
    def __init__(self, sketch: Sketch, drawing: Drawing, title: str | None, legend: bool) -> None:
        self.sketch, self.drawing, self.title, self.legend = sketch, drawing, title, legend
        self.out: list[str] = []

    def text(self) -> str:
        drawing = self.drawing
        above = 30.0 if self.title else 0.0
        rows = self._legend_rows() if self.legend else []
        width = max(drawing.width, 240.0, text_width(self.title or "", TITLE, bold=True) + 30)
        height = above + drawing.height + 20 * len(rows) + (12 if rows else 0)
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self.out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
        self.out.append(f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>')
        if self.title:
            self.out.append(f'<text class="name" x="{_n(width / 2)}" y="20">{escape(self.title)}</text>')
        self.out.append(f'<g transform="translate({_n((width - drawing.width) / 2)} {above:g})">')
        for placed in (p for p in drawing.placed if p.open):
            self._frame(placed)
        for line in sorted(drawing.lines, key=lambda line: not line.skip):
            self._wire(line)
        for label in drawing.labels:
            text = escape(self.sketch.label(label.wire))
            self.out.append(f'<text class="shape" x="{_n(label.x)}" y="{_n(label.y)}">{text}</text>')
        for placed in (p for p in drawing.placed if not p.open):
            self._box(placed)
        for end in drawing.ends:
            self._rect("end", end.x, end.y, end.width, end.height, end.height / 2)
            x, y, name = end.x + end.width / 2, end.y + end.height / 2 + 3.5, self.sketch.end_name(end.wire)
            self.out.append(f'<text x="{_n(x)}" y="{_n(y)}">{escape(name)}</text>')
        self.out.append("</g>")
        for i, row in enumerate(rows):
            self._legend_row(row, above + drawing.height + 8 + 20 * i)
        return "\n".join([*self.out, "</svg>\n"])

    def _rect(self, css: str, x: float, y: float, w: float, h: float, radius: float, extra: str = "") -> None:
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="{radius:g}"'
        self.out.append(f'<rect class="{css}" {box}{extra}/>')

    def _frame(self, p: Placed) -> None:
        face, level = self.sketch.faces[p.part], len(self.sketch.nest.parts[p.part].around)
        self.out.append(f"<g data-part={quoteattr(p.part)}>")
        self._rect("frame odd" if level % 2 else "frame", p.x, p.y, p.width, p.height, 6)
        name = escape(face.name) + (f" × {p.repeat}" if p.repeat > 1 else "")
        self.out.append(f'<text class="name left" x="{_n(p.x + 9)}" y="{_n(p.y + 17)}">{name}</text>')
        place = f'class="small right" x="{_n(p.x + p.width - 9)}"'
        if p.free > sum(face.header) + times_width(p.repeat) + 30:
            place = f'class="small left" x="{_n(p.x + 16 + face.header[0] + times_width(p.repeat))}"'
        self.out.append(f'<text {place} y="{_n(p.y + 17)}">{escape(face.type)}</text></g>')

    def _box(self, p: Placed) -> None:
        face = self.sketch.faces[p.part]
        fill, border = COLOURS[face.kind]
        block = self.sketch.nest.block(p.part)
        radius = p.height / 2 if block.kind == "function" else 4
        colours = f' fill="{fill}" stroke="{border}"'
        self.out.append(f"<g data-part={quoteattr(p.part)}><title>{escape(block.path)} {escape(block.detail)}</title>")
        if p.repeat > 1:  # a sheet behind it
            self._rect("box", p.x + 4, p.y + 4, p.width, p.height, radius, colours)
        self._rect(f"box {face.kind}", p.x, p.y, p.width, p.height, radius, colours)
        if face.kind == "container":
            inner = f' fill="none" stroke="{border}" opacity=".35"'
            self._rect("box", p.x + 2.5, p.y + 2.5, p.width - 5, p.height - 5, 2, inner)
        middle, base = _n(p.x + p.width / 2), p.y + (p.height / 2 + 4 if not face.note else 15)
        self._title(face.name, face.type, p, base)
        if face.note:
            self.out.append(f'<text class="small" x="{middle}" y="{_n(base + 14)}">{escape(face.note)}</text>')
        self.out.append("</g>")

    def _title(self, name: str, type_name: str, p: Placed, base: float) -> None:
        """Name and type side by side, around the middle of a box.

        The name ends where the type begins, so that they are apart whatever the font and whoever draws them; as parts
        of one centred line some programs centre each of the two.
        """
        repeat = f" × {p.repeat}" if p.repeat > 1 else ""
        middle = p.x + p.width / 2
        if not type_name:
            self.out.append(f'<text class="name" x="{_n(middle)}" y="{_n(base)}">{escape(name + repeat)}</text>')
            return
        rest = f"{type_name}{repeat}"
        between = middle + (text_width(name, TITLE, bold=True) - text_width(rest, TITLE)) / 2
        for css, x, text in (("name right", between - _GAP, name), ("left", between + _GAP, rest)):
            self.out.append(f'<text class="{css}" x="{_n(x)}" y="{_n(base)}">{escape(text)}</text>')

    def _wire(self, line: WireSegment) -> None:
        css = " skip" if line.skip else ""
        self.out.append(f'<path class="wire{css}" d="{path(line)}"/>')
        if line.arrow:
            x, y = line.x2, line.y4
            self.out.append(f'<path class="tip{css}" d="M{_n(x)} {_n(y)}l-3.5 -7h7z"/>')

    def _legend_rows(self) -> list[list[tuple[str, str]]]:
        """Swatches and the note about shapes, broken into rows."""
        used = {self.sketch.faces[p.part].kind for p in self.drawing.placed if not p.open}
        items = [(kind, LEGEND[kind]) for kind in COLOURS if kind in used]
        parameters = self.sketch.graph.root.parameters
        items.append(("", f"{count(parameters)} parameters"))
        if self.sketch.batch is not None:
            items += [("", line) for line in BATCH_NOTE.format(batch=self.sketch.batch).split("; ")]
        rows: list[list[tuple[str, str]]] = [[]]
        room = max(self.drawing.width, 240.0) - 28
        for item in items:
            needed = sum(text_width(text, SMALL) + 34 for _, text in (*rows[-1], item))
            if rows[-1] and needed > room:
                rows.append([])
            rows[-1].append(item)
        return rows

    def _legend_row(self, row: list[tuple[str, str]], y: float) -> None:
        x = 14.0
        for kind, text in row:
            if kind:
                fill, border = COLOURS[kind]
                self._rect("box", x, y + 1, 14, 10, 2, f' fill="{fill}" stroke="{border}"')
                x += 19
            self.out.append(f'<text class="small left" x="{_n(x)}" y="{_n(y + 10)}">{escape(text)}</text>')
            x += text_width(text, SMALL) + 15


def path(line: WireSegment) -> str:
    """The outline of a piece of wire."""
    if abs(line.x1 - line.x2) < STRAIGHT:
        return f"M{_n(line.x1)} {_n(line.y1)}V{_n(line.y4)}"
    middle = (line.y2 + line.y3) / 2
    bend = f"C{_n(line.x1)} {_n(middle)} {_n(line.x2)} {_n(middle)} {_n(line.x2)} {_n(line.y3)}"
    return f"M{_n(line.x1)} {_n(line.y1)}V{_n(line.y2)}{bend}V{_n(line.y4)}"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
