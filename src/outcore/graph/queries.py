"""Queries of a planner: where a graph can be cut, what crosses, which skip connections are long.

Both questions are asked at a level of detail (see `outcore.graph.view`). The boxes of that view, in order of execution,
form a line; a *cut* lies between two neighbours on it, a *skip* is a value whose last reader stands further along the
line than the next box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcore.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two neighbouring boxes of the execution order."""

    after: str
    """Name of the box before the cut."""
    before: str
    """Name of the box behind it."""
    values: tuple[str, ...]
    """Values made before (or given as inputs) and read behind."""
    bytes: int
    """Their size, memory that several of them share counted once."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A value whose last reader is far from its producer."""

    value: str
    source: str
    """Box that makes the value."""
    target: str
    """The furthest box that reads it."""
    distance: int
    """How many boxes further along the execution order; 1 would be the next one."""
    bytes: int


def cuts(graph: Graph, depth: int | None) -> list[Cut]:
    """All places where the execution order can be cut; see `Graph.cuts`."""
    line = _Line(graph, depth)
    found = []
    for i in line.gaps():
        crossing = tuple(v for v, (first, last) in line.spans.items() if first <= i < last)
        found.append(Cut(line.boxes[i], line.boxes[i + 1], crossing, _bytes(graph, crossing)))
    return found


def skips(graph: Graph, depth: int | None, longer_than: int) -> list[Skip]:
    """Values that jump over boxes; see `Graph.skips`."""
    line = _Line(graph, depth)
    found = [
        Skip(v, line.boxes[first], line.boxes[last], last - first, graph.values[v].bytes)
        for v, (first, last) in line.spans.items()
        if first >= 0 and last - first > longer_than
    ]
    return sorted(found, key=lambda skip: (-skip.distance, skip.value))


class _Line:
    """The boxes of a view in order of execution, and from where to where each value lives on it."""

    def __init__(self, graph: Graph, depth: int | None) -> None:
        view = graph.view(depth)
        self.boxes = list(view.boxes)
        time = {call: i for i, call in enumerate(graph.calls)}
        place = {call: i for i, box in enumerate(view.boxes.values()) for call in box.calls}
        self._begins = [min(time[c] for c in box.calls) for box in view.boxes.values()]
        self._ends = [max(time[c] for c in box.calls) for box in view.boxes.values()]
        self.spans: dict[str, tuple[int, int]] = {}
        """Value -> places of its producer (-1 for an input) and of its last reader."""
        for name, value in graph.values.items():
            first = -1 if value.producer is None else place.get(value.producer, -1)
            last = max((place[c] for c in value.consumers if c in place), default=first)
            if last > first:
                self.spans[name] = (first, last)

    def gaps(self) -> list[int]:
        """The places i where the boxes up to the i-th end before the next begins (boxes may interleave)."""
        ended = list(accumulate(self._ends, max))
        begun = list(accumulate(reversed(self._begins), min))[::-1]
        return [i for i in range(len(self.boxes) - 1) if ended[i] < begun[i + 1]]


def values_by_base(graph: Graph) -> dict[str, list[str]]:
    """The values that share a piece of memory, by the first value in it (`Value.base`)."""
    found: dict[str, list[str]] = {}
    for value in graph.values.values():
        found.setdefault(value.base, []).append(value.name)
    return found


def reads_after_writes(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Every call that writes in place, with a value in the same memory and a call that reads it afterwards."""
    shared = values_by_base(graph)
    for name, call in graph.calls.items():
        for written in call.mutates:
            for value in shared[graph.values[written].base]:
                for reader in graph.values[value].consumers:
                    if name in graph.calls[reader].after:
                        yield name, value, reader


def _bytes(graph: Graph, names: tuple[str, ...]) -> int:
    """Bytes of some values, views of the same memory once."""
    largest: dict[str, int] = {}
    for name in names:
        value = graph.values[name]
        largest[value.base] = max(largest.get(value.base, 0), value.bytes)
    return sum(largest.values())
