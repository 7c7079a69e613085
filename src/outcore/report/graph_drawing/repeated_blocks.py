"""Repeated blocks drawn once: ``Bottleneck × 5`` instead of five times the same picture.

Two blocks are *identical* when their types, settings, parameter counts and everything inside agree. A table
may fold any identical neighbours. A picture folds them only where nothing is lost by it: neighbours that are
applied one after the other, each reading what the one before it made (and perhaps values that all of them
read, such as a mask), with nothing else looking in between. The first one then stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from outcore.graph.graph import Graph
from outcore.report.graph_drawing.nested_boxes import OUTSIDE, Nest

__all__ = ["InnerWire", "Inside", "inside", "runs", "signatures"]


def signatures(graph: Graph) -> dict[str, int]:
    """For each block a number that identical blocks share."""
    numbers: dict[Hashable, int] = {}
    found: dict[str, int] = {}

    def visit(path: str) -> int:
        block = graph.blocks[path]
        inner = tuple(visit(child) for child in block.children if child in graph.blocks)
        facts = (block.kind, block.type, block.detail, block.parameters, block.calls, inner)
        found[path] = numbers.setdefault(facts, len(numbers))
        return found[path]

    visit("")
    return found


@dataclass(frozen=True, slots=True)
class InnerWire:
    """A wire inside a container."""

    wire: int
    source: int | None
    """Position of the child it comes from; none where it comes from outside."""
    port: int
    """The wire as which it leaves that child: another one where the child stands for several."""
    targets: tuple[int, ...]
    leaves: bool
    """Whether it leaves the container."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What one container shows when it is open."""

    children: tuple[str, ...]
    repeats: tuple[int, ...]
    """How many identical parts each child stands for."""
    links: tuple[InnerWire, ...]


def runs(nest: Nest, container: str, identical: dict[str, int]) -> list[list[str]]:
    """The children of a container, those that may be drawn as one together."""
    parts, found = nest.parts, list[list[str]]()
    readers = {wire: targets for wire, _, targets in nest.inside(container)}

    def shape(wire: int) -> tuple[int, ...]:
        return nest.graph.values[nest.wires[wire].value].shape

    def follows(name: str, run: list[str]) -> bool:
        first, last, this = parts[run[0]], parts[run[-1]], parts[name]
        if nest.block(name).kind == "function" or identical[first.block] != identical[this.block]:
            return False
        handed_on = bool(last.sends) and all(readers[w] == (name,) for w in last.sends)
        before, now = _roles(nest, run[0]), _roles(nest, name)
        return (
            handed_on
            and list(map(shape, first.sends)) == list(map(shape, this.sends))
            and before.keys() == now.keys()
            and all(now[role] in (before[role], *last.sends) for role in now)
            and all(shape(before[role]) == shape(now[role]) for role in now)
        )

    for name in parts[container].children:
        if found and follows(name, found[-1]):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def _roles(nest: Nest, name: str) -> dict[Hashable, int]:
    """The wires that enter a part, by what they are to it: where inside they are read, as which argument."""
    part, found = nest.parts[name], dict[Hashable, int]()
    for index in part.reads:
        wire, places = nest.wires[index], list[tuple[str, int]]()
        for target in wire.targets:
            reader = nest.parts.get(target)
            if reader is not None and (target == name or name in reader.around):
                inputs = nest.graph.calls[target].inputs
                places.append((reader.block.removeprefix(part.block), inputs.index(wire.value)))
        found[tuple(sorted(places))] = index
    return found


def inside(nest: Nest, container: str, identical: dict[str, int] | None) -> Inside:
    """What a container shows: repeats folded, or (without `identical`) every child."""
    parts = nest.parts
    groups = runs(nest, container, identical) if identical else [[c] for c in parts[container].children]
    place = {name: i for i, group in enumerate(groups) for name in group}
    links = []
    for wire, source, targets in nest.inside(container):
        start = None if source is None else place[source]
        ends = tuple(dict.fromkeys(place[t] for t in targets if t != OUTSIDE and place[t] != start))
        leaves = OUTSIDE in targets
        if not ends and not leaves:
            continue  # it stays within a group
        port = wire
        if start is not None and source is not None:
            port = parts[groups[start][0]].sends[parts[source].sends.index(wire)]
        links.append(InnerWire(wire, start, port, ends, leaves))
    return Inside(tuple(g[0] for g in groups), tuple(map(len, groups)), tuple(links))
