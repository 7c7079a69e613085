"""Rows and lanes: how far down each box stands, and where wires pass the rows between their ends.

A box stands one row below the lowest box it reads from, or further down where more wires get shorter by that
than longer, or where nothing that enters leads to it (a position table, a constant mask): then it stands right
above what uses it. A wire that ends more than one row below its start takes a place, a *lane*, in every row it
passes. All readers of one value share its lane: a dense block of 24 layers has 24 lanes, not 276.

An edge is a *skip* if a longer way leads to the same box, else a *branch*: what is left without the skips is
the transitive reduction, which carries the main line.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.report.graph_drawing.routes import Knot, Role, RouteSegment, WireRoute

__all__ = ["Rows"]

PASSES = 3


class Rows:
    """The knots of a scheme with their rows, and the steps between them.

    Ends of routes are knots here: boxes keep their numbers, each wire from or to the outside has a knot of
    its own.
    """

    def __init__(self, boxes: int, routes: Sequence[WireRoute]) -> None:
        self.boxes = boxes
        self.knots = [Knot("box", i) for i in range(boxes)]
        entries = {i: self._knot("in", i) for i, route in enumerate(routes) if route.source is None}
        exits = {i: self._knot("out", i) for i, route in enumerate(routes) if route.leaves}
        self.entries, self.exits = list(entries.values()), list(exits.values())
        self.routes: list[tuple[int, tuple[int, ...]]] = []
        for i, route in enumerate(routes):
            leaving = (exits[i],) if route.leaves else ()
            self.routes.append((entries[i] if route.source is None else route.source, route.targets + leaving))
        self.forward = [*self.entries, *range(boxes), *self.exits]
        """All ends of routes in topological order."""
        self.readers: list[set[int]] = [set() for _ in self.knots]
        for source, targets in self.routes:
            self.readers[source].update(targets)
        self.below = self._reach()
        self.skips = self._skips()
        self.row = self._rows()
        self.steps: list[RouteSegment] = []
        self.lanes = [self._lay(i) for i in range(len(self.routes))]
        """The lane of each route, from the top."""

    def reaches(self, upper: int, lower: int) -> bool:
        """Whether a way leads from one end to another."""
        return bool(self.below[upper] >> lower & 1)

    def far(self, route: int) -> list[int]:
        """The ends of a route that it reaches by its lane."""
        source, targets = self.routes[route]
        return [t for t in targets if self.row[t] > self.row[source] + 1]

    def is_skip(self, route: int) -> bool:
        """Whether a route's lane serves skips only."""
        source = self.routes[route][0]
        return all((source, t) in self.skips for t in self.far(route))

    def passed(self, route: int) -> list[int]:
        """The boxes on other ways to the ends of a route's lane."""
        source, far = self.routes[route][0], self.far(route)
        first = source + 1 if source < self.boxes else 0
        between = range(first, min(self.boxes, max(far)))  # boxes are numbered in topological order
        return [k for k in between if self.reaches(source, k) and any(self.reaches(k, t) for t in far)]

    def _knot(self, role: Role, index: int) -> int:
        self.knots.append(Knot(role, index))
        return len(self.knots) - 1

    def _reach(self) -> list[int]:
        """For each end the set of all ends below it, as bits."""
        reach = [0] * len(self.knots)
        for knot in reversed(self.forward):
            for reader in self.readers[knot]:
                reach[knot] |= reach[reader] | 1 << reader
        return reach

    def _skips(self) -> set[tuple[int, int]]:
        return {
            (knot, reader)
            for knot, readers in enumerate(self.readers)
            for reader in readers
            if any(self.reaches(other, reader) for other in readers)
        }

    def _rows(self) -> list[int]:
        row = [0] * len(self.knots)
        reads: list[list[int]] = [[] for _ in self.knots]
        sends: list[list[int]] = [[] for _ in self.knots]
        for i, (source, targets) in enumerate(self.routes):
            sends[source].append(i)
            for target in targets:
                reads[target].append(i)
        for knot in range(self.boxes):
            row[knot] = max((row[self.routes[i][0]] + 1 for i in reads[knot]), default=1)
        lowest = max((row[knot] for knot in range(self.boxes)), default=0) + 1
        for knot in self.exits:
            row[knot] = lowest
        given = sum(1 << knot for knot in range(self.boxes) if any(self.reaches(e, knot) for e in self.entries))
        for knot in reversed(range(self.boxes)):  # what needs no input stands where it is used
            if not given >> knot & 1 and sends[knot]:
                row[knot] = min(row[t] for i in sends[knot] for t in self.routes[i][1]) - 1
        for _ in range(PASSES):
            for knot in reversed(range(self.boxes)):
                lower = min((row[t] for i in sends[knot] for t in self.routes[i][1]), default=0) - 1
                longer = sum(all(row[t] < lower for t in self.routes[i][1] if t != knot) for i in reads[knot])
                if lower > row[knot] and len(sends[knot]) > longer:
                    row[knot] = lower
        return row

    def _lay(self, index: int) -> list[int]:
        """Add the steps of one route; return its lane."""
        source, targets = self.routes[index]
        skip, knot, lane = self.is_skip(index), source, list[int]()
        last = max(self.row[t] for t in targets)
        for row in range(self.row[source] + 1, last + 1):
            for target in (t for t in targets if self.row[t] == row):
                self.steps.append(RouteSegment(knot, target, index, (source, target) in self.skips))
            if row < last:
                lane.append(self._knot("lane", index))
                self.row.append(row)
                self.steps.append(RouteSegment(knot, lane[-1], index, skip))
                knot = lane[-1]
        return lane
