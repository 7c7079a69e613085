"""The order of each row from left to right, with few crossings.

Branches stand in the order in which the code calls them; the lane of a skip runs to the right of everything
it skips, longer ones further out. For the usual network that is free of crossings and is kept. Otherwise
sweeps (each row sorted by the mean place of its neighbours in the row above, then below) and exchanges of
neighbours start from it, and the best order found is taken.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from outcore.report.graph_drawing.layer_assignment import Rows

__all__ = ["Order"]

SWEEPS = 16


class Order:
    """Rows of knots, and the place of each knot in its row."""

    def __init__(self, rows: Rows, top: Sequence[int] | None, bottom: Sequence[int] | None) -> None:
        self.above: list[list[int]] = [[] for _ in rows.knots]
        self.below: list[list[int]] = [[] for _ in rows.knots]
        for step in rows.steps:
            self.above[step.lower].append(step.upper)
            self.below[step.upper].append(step.lower)
        keys = _keys(rows)
        for given, ends in ((top, rows.entries), (bottom, rows.exits)):
            if given is not None:
                keys.update({knot: (given.index(rows.knots[knot].index), 0.0) for knot in ends})
        self.rows: list[list[int]] = [[] for _ in range(max(rows.row, default=0) + 1)]
        for knot, row in enumerate(rows.row):
            self.rows[row].append(knot)
        for knots in self.rows:
            knots.sort(key=keys.__getitem__)
        self.place = [0] * len(rows.knots)
        self._take(self.rows)
        first = 0 if top is None else 1
        self._improve(range(first, len(self.rows) - bool(bottom)))

    def crossings(self) -> int:
        """How many pairs of steps cross."""
        total = 0
        for knots in self.rows:
            seen: list[int] = []
            for knot in knots:
                ends = sorted(self.place[k] for k in self.below[knot])
                total += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return total

    def _improve(self, free: range) -> None:
        best, fewest = [list(knots) for knots in self.rows], self.crossings()
        for sweep in range(SWEEPS):
            if not fewest:
                break
            down = sweep % 2 == 0
            for row in free if down else reversed(free):
                self._sort(row, self.above if down else self.below)
            for row in free:
                self._exchange(row)
            if (crossings := self.crossings()) < fewest:
                best, fewest = [list(knots) for knots in self.rows], crossings
        self._take(best)

    def _take(self, rows: list[list[int]]) -> None:
        self.rows = rows
        for knots in rows:
            self._number(knots)

    def _number(self, knots: list[int]) -> None:
        for i, knot in enumerate(knots):
            self.place[knot] = i

    def _sort(self, row: int, neighbours: list[list[int]]) -> None:
        def middle(knot: int) -> float:
            near = neighbours[knot]
            return sum(self.place[k] for k in near) / len(near) if near else self.place[knot]

        self.rows[row].sort(key=middle)
        self._number(self.rows[row])

    def _exchange(self, row: int) -> None:
        """Exchange neighbours where that removes crossings."""
        knots = self.rows[row]
        for i in range(len(knots) - 1):
            a, b = knots[i], knots[i + 1]
            gain = sum(self._inversions(n[a], n[b]) - self._inversions(n[b], n[a]) for n in (self.above, self.below))
            if gain > 0:
                knots[i], knots[i + 1] = b, a
                self.place[a], self.place[b] = i + 1, i

    def _inversions(self, left: list[int], right: list[int]) -> int:
        return sum(self.place[a] > self.place[b] for a in left for b in right)


def _keys(rows: Rows) -> dict[int, tuple[float, float]]:
    """Where each knot wants to stand, from left to right."""
    number: dict[int, int] = {}  # depth first along branches, in the order of the code
    for start in rows.forward:
        stack = [start]
        while stack:
            knot = stack.pop()
            if knot not in number:
                number[knot] = len(number)
                stack += sorted((r for r in rows.readers[knot] if (knot, r) not in rows.skips), reverse=True)
    keys = {knot: (float(n), 0.0) for knot, n in number.items()}
    for route, lane in enumerate(rows.lanes):
        if not lane:
            continue
        source = rows.routes[route][0]
        right_of = number[source]
        if rows.is_skip(route):
            right_of = max(number[k] for k in rows.passed(route))
        keys.update(dict.fromkeys(lane, (right_of + 0.5, -number[source])))
    return keys
