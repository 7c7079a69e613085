"""What a planner asks of a graph: where it can be cut, what crosses, what jumps far.

Both questions are asked at a level of detail (see `outcore.graph.view`). The boxes of that view, in order of execution,
form a line; a *cut* lies between two neighbours on it, a *skip* is a value whose last reader stands further along the
line than the next box.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcore.graph.graph import Graph

__all__ = ["Cut", "Skip", "cuts", "skips"]


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
    for i, (before, behind) in enumerate(zip(line.boxes, line.boxes[1:], strict=False)):
        if not line.closed(i):
            continue
        crossing = [v for v, (first, last) in line.spans.items() if first <= i < last]
        found.append(Cut(before, behind, tuple(crossing), _bytes(graph, crossing)))
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
        self.place = {call: i for i, box in enumerate(view.boxes.values()) for call in box.calls}
        self.end = [max(self._order(graph)[c] for c in box.calls) for box in view.boxes.values()]
        self.start = [min(self._order(graph)[c] for c in box.calls) for box in view.boxes.values()]
        self.spans: dict[str, tuple[int, int]] = {}
        for name, value in graph.values.items():
            readers = [self.place[c] for c in value.consumers if c in self.place]
            first = self.place[value.producer] if value.producer in self.place else -1
            if readers and max(readers) > first:
                self.spans[name] = (first, max(readers))

    def closed(self, i: int) -> bool:
        """Whether all boxes up to the i-th end before the next one begins (calls of two boxes may interleave)."""
        return max(self.end[: i + 1]) < min(self.start[i + 1 :])

    def _order(self, graph: Graph) -> dict[str, int]:
        if not hasattr(self, "_ranks"):
            self._ranks = {name: i for i, name in enumerate(graph.calls)}
        return self._ranks


def _bytes(graph: Graph, names: list[str]) -> int:
    """Bytes of some values, views of the same memory once."""
    total, seen = 0, set()
    for name in names:
        base = name
        while (of := graph.values[base].alias_of) is not None:
            base = of
        if base not in seen:
            seen.add(base)
            total += graph.values[name].bytes
    return total
