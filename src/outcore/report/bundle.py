"""The bundle: everything the page shows, as one JSON document.

    {"format": 1, "title": "ResNet", "graph": {…}, "drawing": {…}, "start": {"depth": 1, …}, …}

Each part of the page reads its own key and is left out where the key is missing, so reports grow by adding keys (costs,
plans, timelines) and old bundles stay readable. ``graph`` is `Graph.to_json`; ``drawing`` is what the page cannot
compute itself: the text and size of every box and the scheme of every container, once with functions and once without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outcore.graph.graph import Graph
from outcore.report.graph_drawing.drawing import GEOMETRY
from outcore.report.graph_drawing.layered_drawing import Scheme
from outcore.report.graph_drawing.measured_boxes import Plane, Sketch, times_width
from outcore.report.graph_drawing.nested_boxes import OUTSIDE

__all__ = ["FORMAT", "bundle", "sketch_json"]

FORMAT = 1

FEW = 4
"""A first view with fewer boxes than this shows too little; the next depth is shown instead."""
MANY = 2
"""Functions that only pass values on are hidden at first where there are more than this many to a module."""


def bundle(
    graph: Graph, *, title: str | None = None, depth: int | None = None, **parts: Mapping[str, Any]
) -> dict[str, Any]:
    """The bundle of a graph, for `page`.

    Args:
        graph: the network.
        title: heading of the page; the type of the model by default.
        depth: level of detail to begin with; None for the first that shows more than a few boxes.
        parts: further parts of the report, by name, as plain values.
    """
    with_functions = Sketch(graph)
    return {
        "format": FORMAT,
        "title": title or graph.root.type,
        "graph": graph.to_json(),
        "drawing": {
            "geometry": GEOMETRY,
            "functions": sketch_json(with_functions),
            "modules": sketch_json(Sketch(graph, functions=False)),
        },
        "start": _start(with_functions, depth),
        **parts,
    }


def sketch_json(sketch: Sketch) -> dict[str, Any]:
    """A sketch as plain values; equal schemes are written once."""
    nest = sketch.nest
    schemes: dict[Scheme, int] = {}
    planes = {
        kind: {name: _plane(plane, schemes) for name, plane in chosen.items()}
        for kind, chosen in (("flat", sketch.flat), ("folded", sketch.folded))
    }
    repeats = {n for plane in sketch.folded.values() for n in plane.inside.repeats}
    return {
        "batch": sketch.batch,
        "parts": {
            name: {
                "block": part.block,
                "parent": part.around[-1] if part.around else None,
                "reads": part.reads,
                "sends": part.sends,
                **asdict(sketch.faces[name]),
            }
            for name, part in nest.parts.items()
        },
        "wires": [
            {**asdict(wire), "label": sketch.label(i), "width": sketch.label_width(i)}
            for i, wire in enumerate(nest.wires)
        ],
        "ends": {
            str(i): {"name": sketch.end_name(i), "width": sketch.end_width(i)}
            for i, wire in enumerate(nest.wires)
            if wire.source is None or OUTSIDE in wire.targets
        },
        "times": {str(n): times_width(n) for n in sorted(repeats)},
        **planes,
        "schemes": [_scheme(scheme) for scheme in schemes],
    }


def _plane(plane: Plane, schemes: dict[Scheme, int]) -> dict[str, Any]:
    return {
        "children": plane.inside.children,
        "repeats": plane.inside.repeats,
        "links": [[link.wire, link.port] for link in plane.inside.links],
        "scheme": schemes.setdefault(plane.scheme, len(schemes)),
        "ins": [asdict(ports) for ports in plane.ins],
        "outs": [asdict(ports) for ports in plane.outs],
    }


def _scheme(scheme: Scheme) -> dict[str, Any]:
    return {
        "knots": [[knot.role, knot.index] for knot in scheme.knots],
        "rows": scheme.rows,
        "steps": [[step.upper, step.lower, step.route, int(step.skip)] for step in scheme.steps],
        "columns": scheme.columns,
    }


def _start(sketch: Sketch, depth: int | None) -> dict[str, Any]:
    """What the page shows first: neither too few boxes nor mostly functions."""
    parts = [(name, len(part.around)) for name, part in sketch.nest.parts.items() if name]
    deepest = max((level for _, level in parts), default=1)
    chosen = depth or next((d for d in range(1, deepest) if sum(v <= d for _, v in parts) >= FEW), deepest)
    kinds = [sketch.nest.block(name).kind == "function" for name, level in parts if level <= chosen]
    return {"depth": chosen, "functions": sum(kinds) <= MANY * (len(kinds) - sum(kinds))}
