"""Coordinates: from schemes and sizes to a drawing, containers from the inside out.

An open container is laid out first and is then one large box to the container around it, with ports where its
wires enter and leave. Rows lie below each other, as high as their highest box; a wire runs vertically beside
the boxes of a row and bends only between rows, so it crosses no box. Shape labels have room below the box
that makes the value.

**One algorithm, two languages.** The page has to lay out after every click, without a server. What is hard,
rows, order and columns (`outcore.report.graph_drawing.layered_drawing`), does not depend on what is open, so it is
computed in Python alone and travels in the bundle. What is left is this file and
`outcore.report.graph_drawing.coordinate_assignment`; ``page/layout.js`` is the same in JavaScript, function by
function, and a test lays out the same graphs with both and compares every coordinate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

from outcore.graph.parts import ROOT
from outcore.report.graph_drawing.coordinate_assignment import Pull, settle
from outcore.report.graph_drawing.drawing import GEOMETRY, Drawing, End, Label, Placed, WireSegment
from outcore.report.graph_drawing.layered_drawing import Scheme
from outcore.report.graph_drawing.measured_boxes import Plane, Ports, Sketch, times_width

__all__ = ["STRAIGHT", "lay_out"]

STRAIGHT = 0.5
"""A wire that moves less than this sideways is drawn straight."""


@dataclass(slots=True)
class _Extent:
    """The size of something around its anchor, where the main line passes, and the places of its ports."""

    left: float = 0.0
    right: float = 0.0
    height: float = 0.0
    """With the labels below."""
    box: float = 0.0
    """Without them."""
    ins: dict[int, float] = field(default_factory=dict)
    """Where wires arrive, from the anchor."""
    outs: dict[int, float] = field(default_factory=dict)
    labels: bool = False
    """Whether the wires that leave are labelled."""
    body: _Body | None = None


@dataclass(slots=True)
class _Body:
    """The inside of an open container, relative to its anchor and top."""

    plane: Plane
    extents: list[_Extent]
    x: list[float]
    tops: list[float]
    bottoms: list[float]
    height: float


def lay_out(sketch: Sketch, opened: Collection[str], *, fold: bool = True, flat: Collection[str] = ()) -> Drawing:
    """Lay out a graph with some containers open.

    Args:
        sketch: the prepared graph.
        opened: names of the parts that show their inside; the whole model always does.
        fold: whether repeated parts are drawn once.
        flat: containers in which nothing is folded nevertheless.
    """
    return _Layout(sketch, {ROOT, *opened}, fold, set(flat)).drawing()


class _Layout:
    def __init__(self, sketch: Sketch, opened: set[str], fold: bool, flat: set[str]) -> None:
        self.sketch, self.opened, self.fold, self.flat = sketch, opened, fold, flat

    def drawing(self) -> Drawing:
        body = self._body(ROOT)
        left, right = _sides(body)
        drawing = Drawing(left + right, body.height)
        self._draw(drawing, ROOT, body, left, 0.0, set())
        return drawing

    def _body(self, part: str) -> _Body:
        """Lay out the inside of an open container."""
        plane = self.sketch.plane(part, fold=self.fold and part not in self.flat)
        links = plane.inside.links
        extents = []
        for knot in plane.scheme.knots:
            if knot.role == "box":
                extents.append(self._extent(plane, knot.index))
            elif part == ROOT and knot.role != "lane":
                extents.append(self._end(links[knot.index].wire, knot.role == "in"))
            else:
                extents.append(_Extent())
        shifts = []
        for step in plane.scheme.steps:
            link = links[step.route]
            start = extents[step.upper].outs.get(link.port, 0.0)
            shifts.append(start - extents[step.lower].ins.get(link.wire, 0.0))
        x = _across(plane.scheme, extents, shifts)
        tops, bottoms, height = _down(plane.scheme, extents, x, shifts, framed=part != ROOT)
        return _Body(plane, extents, x, tops, bottoms, height)

    def _extent(self, plane: Plane, index: int) -> _Extent:
        """The size of a box, open or closed."""
        g, links = GEOMETRY, plane.inside.links
        part, repeat = plane.inside.children[index], plane.inside.repeats[index]
        ins, outs = plane.ins[index], plane.outs[index]
        if part in self.opened and part in self.sketch.flat:
            return self._frame(part, repeat, ins, [links[route].wire for route in ins.routes])
        half = self._half(part, repeat)
        sheet = g["sheet"] if repeat > 1 else 0.0
        height = self.sketch.faces[part].height + sheet
        extent = _Extent(half, half + sheet, height, height, labels=bool(outs.routes))
        places = _spread([g["port_gap"]] * len(ins.routes), ins.main, half - g["inset"])
        for route, at in zip(ins.routes, places, strict=True):
            extent.ins[links[route].wire] = at
        widths = [g["label_gap"] + self.sketch.label_width(links[route].port) for route in outs.routes]
        spaces = [width + g["label_gap"] for width in widths]
        for route, at, width in zip(outs.routes, _spread(spaces, outs.main), widths, strict=True):
            extent.outs[links[route].port] = at
            extent.left, extent.right = max(extent.left, -at), max(extent.right, at + width)
        if extent.labels:
            extent.height += g["label"]
        return extent

    def _frame(self, part: str, repeat: int, ins: Ports, arriving: Sequence[int]) -> _Extent:
        """The size of an open container: its name stands left of the wires that enter, its type right."""
        g, body = GEOMETRY, self._body(part)
        left, right = _sides(body)
        links, knots = body.plane.inside.links, body.plane.scheme.knots
        entries = {links[k.index].wire: body.x[i] for i, k in enumerate(knots) if k.role == "in"}
        exits = {links[k.index].wire: body.x[i] for i, k in enumerate(knots) if k.role == "out"}
        name, type_name = self.sketch.faces[part].header
        left = max(left, name + times_width(repeat) + 2 * g["margin"] - min(entries.values(), default=0.0))
        right = max(right, type_name + 2 * g["margin"] + max(entries.values(), default=0.0))
        # The main line passes where it comes straight from above, else in the middle of what enters.
        ends = list((entries or exits or {0: 0.0}).values())
        anchor = (min(ends) + max(ends)) / 2 if ins.main is None else entries[arriving[ins.main]]
        body.x = [at - anchor for at in body.x]
        return _Extent(
            left + anchor,
            right - anchor,
            body.height,
            body.height,
            {wire: at - anchor for wire, at in entries.items()},
            {wire: at - anchor for wire, at in exits.items()},
            body=body,
        )

    def _end(self, wire: int, is_input: bool) -> _Extent:
        """The size of an input or output of the model."""
        g, half = GEOMETRY, self._half_end(wire)
        extent = _Extent(half, half, g["pill"], g["pill"], labels=is_input)
        if is_input:
            extent.outs[wire] = 0.0
            extent.right = max(half, g["label_gap"] + self.sketch.label_width(wire))
            extent.height += g["label"]
        return extent

    def _half(self, part: str, repeat: int) -> float:
        return (self.sketch.faces[part].width + times_width(repeat)) / 2

    def _half_end(self, wire: int) -> float:
        return self.sketch.end_width(wire) / 2 + GEOMETRY["pill_pad"]

    def _draw(self, drawing: Drawing, part: str, body: _Body, x0: float, y0: float, skips: set[int]) -> None:
        """Draw the inside of a container; `skips` are the wires that come into it as skips."""
        g, scheme, links = GEOMETRY, body.plane.scheme, body.plane.inside.links
        row_of = {knot: i for i, row in enumerate(scheme.rows) for knot in row}
        top, bottom, names = [0.0] * len(row_of), [0.0] * len(row_of), [""] * len(row_of)
        arriving: list[set[int]] = [set() for _ in row_of]
        for step in scheme.steps:
            if step.skip:
                arriving[step.lower].add(links[step.route].wire)
        for i, knot in enumerate(scheme.knots):
            extent, x, row = body.extents[i], x0 + body.x[i], row_of[i]
            top[i] = bottom[i] = y0 + body.tops[row]
            if not extent.height:
                continue
            top[i] += (body.bottoms[row] - body.tops[row] - extent.height) / 2
            bottom[i] = top[i] + extent.box
            if extent.labels:
                y = bottom[i] + g["label"] - 3
                starts = ((wire, x + at + g["label_gap"]) for wire, at in extent.outs.items())
                drawing.labels += [Label(wire, start, y) for wire, start in starts]
            if knot.role == "box":
                names[i] = body.plane.inside.children[knot.index]
                repeat = body.plane.inside.repeats[knot.index]
                self._place(drawing, names[i], repeat, extent, x, top[i], arriving[i])
            else:
                wire, half = links[knot.index].wire, self._half_end(links[knot.index].wire)
                drawing.ends.append(End(wire, x - half, top[i], 2 * half, extent.box))
        for step in scheme.steps:
            link, upper, lower = links[step.route], body.extents[step.upper], body.extents[step.lower]
            drawing.lines.append(
                WireSegment(
                    link.wire,
                    link.port,
                    x0 + body.x[step.upper] + upper.outs.get(link.port, 0.0),
                    x0 + body.x[step.lower] + lower.ins.get(link.wire, 0.0),
                    bottom[step.upper],
                    y0 + body.bottoms[row_of[step.upper]],
                    y0 + body.tops[row_of[step.lower]],
                    top[step.lower],
                    step.skip or link.wire in skips,
                    names[step.upper],
                    names[step.lower],
                    arrow=lower.height > 0 and lower.body is None,
                )
            )

    def _place(
        self, drawing: Drawing, part: str, repeat: int, extent: _Extent, x: float, y: float, skips: set[int]
    ) -> None:
        """Draw a box or a frame with its inside."""
        if extent.body is None:
            half = self._half(part, repeat)
            height = self.sketch.faces[part].height
            drawing.placed.append(Placed(part, x - half, y, 2 * half, height, repeat, False))
        else:
            width = extent.left + extent.right
            free = extent.left + min(extent.ins.values(), default=extent.right)
            drawing.placed.append(Placed(part, x - extent.left, y, width, extent.box, repeat, True, free))
            self._draw(drawing, part, extent.body, x, y, skips)


def _sides(body: _Body) -> tuple[float, float]:
    """How far the inside of a container extends, with its margin."""
    pairs = list(zip(body.extents, body.x, strict=True))
    left = max((extent.left - at for extent, at in pairs), default=0.0)
    right = max((extent.right + at for extent, at in pairs), default=0.0)
    return left + GEOMETRY["pad"], right + GEOMETRY["pad"]


def _spread(spaces: Sequence[float], main: int | None, room: float | None = None) -> list[float]:
    """Places of ports beside each other: the main one at 0, or all centred; squeezed into the room."""
    places, at = list[float](), 0.0
    for space in spaces:
        places.append(at)
        at += space
    middle = (places[0] + places[-1]) / 2 if main is None and places else places[main or 0] if places else 0.0
    widest = max((abs(place - middle) for place in places), default=0.0)
    scale = room / widest if room is not None and widest > room else 1.0
    return [(place - middle) * scale for place in places]


def _across(scheme: Scheme, extents: Sequence[_Extent], shifts: Sequence[float]) -> list[float]:
    """The x of every knot."""
    g = GEOMETRY
    straight = {(step.upper, step.lower): shift for step, shift in zip(scheme.steps, shifts, strict=True)}
    column, bent = [0] * len(scheme.knots), [0.0] * len(scheme.knots)
    for i, knots in enumerate(scheme.columns):
        column[knots[0]] = i
        for upper, lower in pairwise(knots):  # wires stay straight where a frame has its exit beside its entry
            column[lower], bent[lower] = i, bent[upper] + straight[upper, lower]
    apart: list[dict[int, float]] = [{} for _ in scheme.columns]
    for row in scheme.rows:
        for a, b in pairwise(row):
            boxes = (scheme.knots[a].role == "box") + (scheme.knots[b].role == "box")
            gap = g["lane_gap"] + boxes * (g["box_gap"] - g["lane_gap"]) / 2
            space = extents[a].right + bent[a] + gap + extents[b].left - bent[b]
            spaces, other = apart[column[b]], column[a]
            spaces[other] = max(spaces.get(other, space), space)
    solid = [sum(scheme.knots[knot].role != "lane" for knot in knots) for knots in scheme.columns]
    weight = [n + 0.001 * len(knots) for n, knots in zip(solid, scheme.columns, strict=True)]
    pulls: list[list[Pull]] = [[] for _ in scheme.columns]
    for step, shift in zip(scheme.steps, shifts, strict=True):
        a, b = column[step.upper], column[step.lower]
        if a != b:
            offset = shift + bent[step.upper] - bent[step.lower]
            pulls[a].append((0.01 if step.skip and solid[a] else 1.0, b, -offset))
            pulls[b].append((0.01 if step.skip and solid[b] else 1.0, a, offset))
    x = settle(weight, apart, pulls)
    return [x[c] + offset for c, offset in zip(column, bent, strict=True)]


def _down(
    scheme: Scheme, extents: Sequence[_Extent], x: Sequence[float], shifts: Sequence[float], *, framed: bool
) -> tuple[list[float], list[float], float]:
    """Top and bottom of every row, and the height of all."""
    g = GEOMETRY
    row_of = {knot: i for i, row in enumerate(scheme.rows) for knot in row}
    bends = [0.0] * len(scheme.rows)
    for step, shift in zip(scheme.steps, shifts, strict=True):
        upper = row_of[step.upper]
        bends[upper] = max(bends[upper], abs(x[step.upper] + shift - x[step.lower]))
    tops, bottoms = list[float](), list[float]()
    y = g["header"] if framed else g["pad"]
    for i, row in enumerate(scheme.rows):
        if i:  # whole pixels, so that pieces of wire meet without a seam
            y += g["row_gap"] + ceil(min(g["bend_most"], g["bend"] * bends[i - 1]))
        height = max(extents[knot].height for knot in row)
        if framed and i == 0 and not height:
            # Wires enter at the top edge and pass the title before they bend.
            tops.append(0.0)
            bottoms.append(g["header"] - g["margin"] if bends[0] > STRAIGHT else 0.0)
            y = max(bottoms[0], g["header"] - g["row_gap"])
            continue
        tops.append(y)
        y += height
        bottoms.append(y)
    ends_open = bool(scheme.rows) and not max(extents[knot].height for knot in scheme.rows[-1])
    return tops, bottoms, y if framed and ends_open else y + g["pad"]
