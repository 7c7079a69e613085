"""The graph as boxes within boxes: calls of containers with the calls inside them, and the wires between.

`Graph.view` shows one level of detail; a picture whose containers open and close needs all of them at once. A
*nest* is the tree of calls (of containers and of leaves), and a *wire* is one value on its way from the call
that makes it to the calls that read it. A wire that crosses the border of a container enters or leaves it
there; so what a container looks like inside does not depend on what else is open, and what it looks like
outside not on whether it is open itself.

Calls of one container follow each other without others in between, and wires go forward in that order. Where
a model returns to a container it had left without calling it again (a module entered by another method than
``forward``), the second visit is a part of its own, ``name~2``, so that this always holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from outcore.graph.graph import Graph
from outcore.graph.parts import ROOT, Block

__all__ = ["OUTSIDE", "Nest", "NestedCall", "NestedWire"]

OUTSIDE = "(outside)"
"""Stands for the reader of a wire that leaves the model."""


@dataclass(frozen=True, slots=True)
class NestedWire:
    """A value on its way from the leaf that makes it to the leaves that read it."""

    source: str | None
    """The leaf; none for an input of the model."""
    value: str
    targets: tuple[str, ...]
    origin: str
    """The call, or the input of the model, that it comes from."""


@dataclass(slots=True)
class NestedCall:
    """One call of a container or of a leaf."""

    name: str
    block: str
    around: tuple[str, ...]
    """Names of the parts it is inside of, the whole model first."""
    children: list[str] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    """Wires that enter it."""
    sends: list[int] = field(default_factory=list)
    """Wires that leave it."""


class Nest:
    """All parts of a graph, by name, and the wires between them."""

    def __init__(self, graph: Graph, *, functions: bool = True) -> None:
        """Build the nest; without `functions`, leave out those that only pass one thing on."""
        self.graph = graph
        self.parts: dict[str, NestedCall] = {ROOT: NestedCall(ROOT, ROOT, ())}
        found = _connections(graph, functions)
        shown = {end for (origin, _), targets in found.items() for end in (origin, *targets)}
        names = {OUTSIDE: OUTSIDE}
        stack: list[str] = []  # open containers as the view names them
        opened: list[str] = [ROOT]  # and as they are named here
        for box in graph.view(None).boxes.values():
            if box.kind == "function" and not functions and box.name not in shown:
                continue
            keep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stack, box.around, strict=False)))
            del stack[keep:], opened[keep + 1 :]
            for container in box.around[keep:]:
                stack.append(container)
                opened.append(self._add(container, opened))
            names[box.name] = self._add(box.name, opened)
        self.wires = [
            NestedWire(names.get(origin), value, tuple(names[target] for target in targets), origin)
            for (origin, value), targets in found.items()
        ]
        for index, wire in enumerate(self.wires):
            self._connect(index, wire)

    def block(self, part: str) -> Block:
        """The block that a part is a call of."""
        return self.graph.blocks[self.parts[part].block]

    def containers(self) -> Iterator[NestedCall]:
        """All parts with something inside, outer ones first."""
        return (part for part in self.parts.values() if part.children)

    def child(self, container: str, leaf: str) -> str:
        """The part directly inside a container that a leaf is (in)."""
        path = (*self.parts[leaf].around, leaf)
        return path[path.index(container) + 1]

    def inside(self, container: str) -> list[tuple[int, str | None, tuple[str, ...]]]:
        """The wires in a container: number, the child it comes from (none: outside), what reads it there."""
        here = self.parts[container]
        order = {name: i for i, name in enumerate(here.children)}
        indices = dict.fromkeys([*here.reads, *(w for c in here.children for w in self.parts[c].sends)])
        found = []
        for index in indices:
            wire = self.wires[index]
            source = None if index in here.reads else self.child(container, wire.source or "")
            targets = {self.child(container, t) for t in wire.targets if self._within(container, t)} - {source}
            outside = (OUTSIDE,) if index in here.sends or (container == ROOT and OUTSIDE in wire.targets) else ()
            found.append((index, source, (*sorted(targets, key=order.__getitem__), *outside)))
        return found

    def _add(self, name: str, opened: list[str]) -> str:
        own, visit = name, 1
        while own in self.parts:
            visit += 1
            own = f"{name}~{visit}"
        self.parts[own] = NestedCall(own, name.rpartition("#")[0], tuple(opened))
        self.parts[opened[-1]].children.append(own)
        return own

    def _connect(self, index: int, wire: NestedWire) -> None:
        """Enter a wire where it crosses borders: all parts around one end that are not around the other."""
        source = () if wire.source is None else (*self.parts[wire.source].around, wire.source)
        if wire.source is None:
            self.parts[ROOT].reads.append(index)
        for target in wire.targets:
            path = () if target == OUTSIDE else (*self.parts[target].around, target)
            for part in source:
                if part not in path and part != ROOT and index not in self.parts[part].sends:
                    self.parts[part].sends.append(index)
            for part in path:
                if part not in source and part != ROOT and index not in self.parts[part].reads:
                    self.parts[part].reads.append(index)

    def _within(self, container: str, leaf: str) -> bool:
        return leaf != OUTSIDE and container in self.parts[leaf].around


def _connections(graph: Graph, functions: bool) -> dict[tuple[str, str], dict[str, None]]:
    """For each value and the call or input it comes from, the calls that read it.

    Without `functions`, a function that reads from one place only passes on what comes from there, and one that reads
    nothing is left out with what it makes. Functions that combine values stay, or a residual network would become one
    in which every block reads all blocks before it.
    """
    origin: dict[str, str | None] = {name: name for name in graph.inputs}
    found: dict[tuple[str, str], dict[str, None]] = {}

    def read(values: Iterable[str], reader: str) -> None:
        for value in values:
            if (source := origin[value]) is not None:
                found.setdefault((source, value), {})[reader] = None

    for call in graph.calls.values():
        origins = {source for value in call.inputs if (source := origin[value]) is not None}
        if not functions and graph.blocks[call.block].kind == "function" and len(origins) < 2:
            origin.update(dict.fromkeys(call.outputs, next(iter(origins), None)))
        else:
            read(call.inputs, call.name)
            origin.update(dict.fromkeys(call.outputs, call.name))
    read(graph.outputs, OUTSIDE)
    return found
