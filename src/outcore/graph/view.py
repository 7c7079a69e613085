"""The graph at one level of detail: which boxes a reader sees and how they connect.

A view shows every call as part of the deepest block that is *visible*: blocks down to a depth, and the inside of blocks
expanded on their own. Connections between calls become connections between the boxes they are shown in; where functions
are hidden, a connection passes through them, so that ``conv1 -> relu -> pool1`` reads ``conv1 -> pool1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outcore.graph.parts import BlockKind, Call, ancestors

if TYPE_CHECKING:
    from outcore.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Box:
    """A block (or one call of it) as shown."""

    name: str
    """Path of the block; with ``#call`` where calls are shown apart."""
    block: str
    kind: BlockKind
    calls: tuple[str, ...]
    """The calls of leaf blocks it stands for."""
    around: tuple[str, ...]
    """The expanded blocks it is drawn inside of, outermost first, named like boxes."""


@dataclass(frozen=True)
class View:
    """Boxes in order of execution, and edges from box to box with the values that flow along each."""

    boxes: Mapping[str, Box]
    edges: Mapping[tuple[str, str], tuple[str, ...]]
    inputs: Mapping[str, tuple[str, ...]]
    """Input of the model -> boxes that read it."""
    outputs: Mapping[str, str]
    """Output value of the model -> box it comes from (left out where an input is returned as it came)."""

    def adjacency(self, direction: Literal["outputs", "inputs"]) -> dict[str, list[str]]:
        """Each box with the boxes it feeds, or that feed it."""
        lists: dict[str, list[str]] = {name: [] for name in self.boxes}
        order = {name: i for i, name in enumerate(self.boxes)}
        for source, target in sorted(self.edges, key=lambda edge: (order[edge[0]], order[edge[1]])):
            if direction == "outputs":
                lists[source].append(target)
            else:
                lists[target].append(source)
        return lists


def view(graph: Graph, depth: int | None, expanded: tuple[str, ...], functions: bool, by_call: bool) -> View:
    """Build the view; see `Graph.view`."""
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1 (the model's own children), not {depth}")
    visible = _Visible(graph, depth, expanded, by_call)
    members: dict[str, list[str]] = {}
    shown: dict[str, str] = {}  # call -> box
    for call in graph.calls.values():
        if functions or graph.blocks[visible.block(call)].kind != "function":
            shown[call.name] = visible.box(call)
            members.setdefault(shown[call.name], []).append(call.name)

    # The boxes a value comes from: the box of its producer, or, through hidden functions, the boxes of their inputs.
    origins: dict[str, dict[str, None]] = {}
    edges: dict[tuple[str, str], dict[str, None]] = {}
    readers: dict[str, dict[str, None]] = {name: {} for name in graph.inputs}
    for name in graph.inputs:
        origins[name] = {name: None}
    for call in graph.calls.values():
        box = shown.get(call.name)
        if box is None:
            merged = {origin: None for v in call.inputs for origin in origins[v]}
            origins.update(dict.fromkeys(call.outputs, merged))
            continue
        for value in call.inputs:
            for origin in origins[value]:
                if origin in readers and origin not in members:
                    readers[origin][box] = None
                elif origin != box:
                    edges.setdefault((origin, box), {})[value] = None
        origins.update({v: {box: None} for v in call.outputs})

    boxes = {
        name: Box(
            name,
            block := visible.block(first := graph.calls[calls[0]]),
            graph.blocks[block].kind,
            tuple(calls),
            visible.around(first),
        )
        for name, calls in members.items()
    }
    return View(
        boxes=boxes,
        edges={edge: tuple(values) for edge, values in edges.items()},
        inputs={name: tuple(found) for name, found in readers.items()},
        outputs={v: o for v in graph.outputs for o in origins.get(v, {}) if o in boxes},
    )


class _Visible:
    """Which block each call is shown as."""

    def __init__(self, graph: Graph, depth: int | None, expanded: tuple[str, ...], by_call: bool) -> None:
        self.graph, self.depth, self.by_call = graph, depth, by_call
        self.open = {p for path in expanded for p in (*ancestors(path), path)}

    def is_open(self, path: str) -> bool:
        level = path.count(".") + 1
        return self.depth is None or level < self.depth or path in self.open

    def block(self, call: Call) -> str:
        return next((p for p in ancestors(call.block) if not self.is_open(p)), call.block)

    def box(self, call: Call) -> str:
        block = self.block(call)
        return self._name(block, call) if self.by_call else block

    def around(self, call: Call) -> tuple[str, ...]:
        block = self.block(call)
        return tuple(self._name(p, call) if self.by_call else p for p in ancestors(block))

    def _name(self, block: str, call: Call) -> str:
        if block == call.block:
            return call.name
        return next((s for s in call.scope if s.rpartition("#")[0] == block), f"{block}#0")
