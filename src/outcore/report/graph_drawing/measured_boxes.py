"""A graph prepared for drawing: text and size of every box, scheme of every container, folded and flat.

This is what the page is given and what the static picture is drawn from. Containers are arranged from the
outside in: where wires arrive at a box in the order a, b, c, they enter in that order when the box is opened,
so that they do not have to cross at its border.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from outcore.graph.graph import Graph
from outcore.graph.parts import ROOT
from outcore.report.graph_drawing.labels import count, kind_of, shape_label, shorten, summary, text_width
from outcore.report.graph_drawing.layered_drawing import Scheme, arrange
from outcore.report.graph_drawing.nested_boxes import Nest
from outcore.report.graph_drawing.repeated_blocks import Inside, inside, signatures
from outcore.report.graph_drawing.routes import WireRoute

__all__ = ["BATCH_NOTE", "SMALL", "TITLE", "Face", "Plane", "Ports", "Sketch", "times_width"]

TITLE, SMALL = 12.0, 10.0
"""Font sizes in pixels."""
WIDEST = 210.0
"""Text in a box is cut at this width."""

BATCH_NOTE = "shapes without the batch of {batch}; [whole shapes] where it does not lead"


@dataclass(frozen=True, slots=True)
class Face:
    """How a box looks while it is closed."""

    name: str
    type: str
    note: str
    """Second line: settings and number of parameters."""
    kind: str
    """Decides the colour: a kind of layer, or ``container``."""
    width: float
    height: float
    header: tuple[float, float]
    """Widths of its name and its type in the title of its frame when it is open."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where routes arrive at or leave a box, from left to right."""

    routes: tuple[int, ...]
    main: int | None
    """Position of the route that goes straight up or down."""


@dataclass(frozen=True, slots=True)
class Plane:
    """What an open container shows and how it is arranged."""

    inside: Inside
    scheme: Scheme
    ins: tuple[Ports, ...]
    outs: tuple[Ports, ...]


class Sketch:
    """Faces of all parts and planes of all containers of a graph."""

    def __init__(self, graph: Graph, *, functions: bool = True) -> None:
        self.graph, self.nest = graph, Nest(graph, functions=functions)
        self.batch = _batch(graph)
        self.faces = {name: self._face(name) for name in self.nest.parts}
        self.flat: dict[str, Plane] = {}
        self.folded: dict[str, Plane] = {}
        """Only containers in which something repeats."""
        identical = signatures(graph)
        entering: dict[str, tuple[list[int], list[int]]] = {}
        for container in self.nest.containers():
            everything = inside(self.nest, container.name, None)
            shorter = inside(self.nest, container.name, identical)
            if len(shorter.children) < len(everything.children):
                self.folded[container.name] = self._plane(container.name, shorter, entering)
            self.flat[container.name] = self._plane(container.name, everything, entering)

    def plane(self, container: str, *, fold: bool) -> Plane:
        """The inside of a container."""
        return self.folded.get(container, self.flat[container]) if fold else self.flat[container]

    def label(self, wire: int) -> str:
        """The shape of the value on a wire."""
        return shape_label(self.graph.values[self.nest.wires[wire].value].shape, self.batch)

    def label_width(self, wire: int) -> float:
        """Width of that label in pixels."""
        return text_width(self.label(wire), SMALL)

    def end_name(self, wire: int) -> str:
        """What an input or output of the model is called."""
        if self.nest.wires[wire].source is None:
            return self.nest.wires[wire].origin
        outputs, names = self.graph.outputs, self.graph.output_names
        number = outputs.index(self.nest.wires[wire].value)
        told = names[number] if number < len(names) else ""
        if told and not told.replace(".", "").isdecimal():
            return shorten(told, SMALL, WIDEST)
        return "output" if len(outputs) == 1 else f"output {told or number}"

    def end_width(self, wire: int) -> float:
        """Width of that name in pixels."""
        return text_width(self.end_name(wire), SMALL)

    def _plane(self, container: str, shown: Inside, entering: dict[str, tuple[list[int], list[int]]]) -> Plane:
        routes = tuple(WireRoute(link.source, link.targets, link.leaves) for link in shown.links)
        top: tuple[int, ...] | None = None
        bottom: tuple[int, ...] | None = None
        if container != ROOT:
            reads, sends = entering[container]
            place = {link.wire: i for i, link in enumerate(shown.links)}
            top = tuple(place[w] for w in reads)
            bottom = tuple(place[w] for w in sends)
        scheme = arrange(len(shown.children), routes, top, bottom)
        ins, outs = _ports(scheme, len(shown.children), "in"), _ports(scheme, len(shown.children), "out")
        for i, child in enumerate(shown.children):
            reads = [shown.links[r].wire for r in ins[i].routes]
            sends = [shown.links[r].port for r in outs[i].routes]
            part = self.nest.parts[child]
            entering.setdefault(
                child,
                (
                    reads + [w for w in part.reads if w not in reads],
                    sends + [w for w in part.sends if w not in sends],
                ),
            )
        return Plane(shown, scheme, ins, outs)

    def _face(self, name: str) -> Face:
        block = self.nest.block(name)
        container = bool(self.nest.parts[name].children)
        title, kind = block.name or block.type, "container" if container else kind_of(block.type)
        type_name = "" if block.kind == "function" or title.lower() == block.type.lower() else block.type
        if block.kind == "function":
            title = block.type
        elif block.calls > 1:
            title += "#" + name.rpartition("#")[2]
        words = [summary(block.type, block.detail)] if not container and block.kind != "function" else []
        if block.parameters:
            words.append(f"{count(block.parameters)} params" + (", shared" if block.calls > 1 else ""))
        note = shorten(" · ".join(w for w in words if w), SMALL, WIDEST)
        title = shorten(title, TITLE, WIDEST * 0.65, bold=True)
        title_width = text_width(title, TITLE, bold=True)
        type_name = shorten(type_name, TITLE, WIDEST - title_width)
        width = title_width + (text_width(" " + type_name, TITLE) if type_name else 0)
        width = max(width, text_width(note, SMALL))
        height = 22.0 if not note else 36.0
        header = (title_width, text_width(type_name, SMALL))
        if block.kind == "function":
            return Face(title, "", "", kind, max(44.0, width + 18), 20.0, header)
        return Face(title, type_name, note, kind, max(72.0, width + 20), height, header)


def times_width(repeat: int) -> float:
    """Width of ``× 5`` behind a title, in pixels; 0 for what does not repeat."""
    return text_width(f" × {repeat}", TITLE, bold=True) if repeat > 1 else 0.0


def _ports(scheme: Scheme, boxes: int, side: Literal["in", "out"]) -> tuple[Ports, ...]:
    """Routes at each box in the order of their other ends."""
    place = {knot: i for row in scheme.rows for i, knot in enumerate(row)}
    straight = {pair for column in scheme.columns for pair in pairwise(column)}
    found: list[dict[int, list[int]]] = [{} for _ in range(boxes)]
    main: list[int | None] = [None] * boxes
    for step in scheme.steps:
        box, other = (step.lower, step.upper) if side == "in" else (step.upper, step.lower)
        if box < boxes:
            found[box].setdefault(step.route, []).append(place[other])
            if (step.upper, step.lower) in straight:
                main[box] = step.route
    ports = []
    for routes, straight_one in zip(found, main, strict=True):
        ordered = sorted(routes, key=lambda r: sum(routes[r]) / len(routes[r]))
        ports.append(Ports(tuple(ordered), None if straight_one is None else ordered.index(straight_one)))
    return tuple(ports)


def _batch(graph: Graph) -> int | None:
    """The leading size that all inputs share."""
    sizes = {graph.values[name].shape[0] for name in graph.inputs if graph.values[name].shape}
    return sizes.pop() if len(sizes) == 1 else None
