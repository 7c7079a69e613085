"""Columns: the knots that stand on one straight vertical line.

Lanes are straight before anything else, then the longest ways through the network, as far as they do not
cross. Where three or more branches part or join, none of them is the straight one, so that the box stands
centred above or below them. (U. Brandes, B. Köpf: *Fast and simple horizontal coordinate assignment*, 2001,
align knots to the medians of their neighbours instead, which bends main lines towards their skips.)
"""

from __future__ import annotations

from itertools import pairwise

from outcore.report.graph_drawing.crossing_reduction import Order
from outcore.report.graph_drawing.layer_assignment import Rows
from outcore.report.graph_drawing.routes import RouteSegment

__all__ = ["columns"]

CROWD = 3
"""So many branches part or join without a straight one."""


def columns(rows: Rows, order: Order) -> list[tuple[int, ...]]:
    """The columns of a scheme, each after those left of it."""
    down = _links(rows, order)
    upper_ends = set(down.values())
    found: list[tuple[int, ...]] = []
    column_of: dict[int, int] = {}
    for knots in order.rows:
        for knot in knots:
            if knot not in upper_ends:
                chain = [knot]
                while chain[-1] in down:
                    chain.append(down[chain[-1]])
                column_of.update(dict.fromkeys(chain, len(found)))
                found.append(tuple(chain))
    left: list[set[int]] = [set() for _ in found]
    for knots in order.rows:
        for a, b in pairwise(knots):
            left[column_of[b]].add(column_of[a])
    return [found[i] for i in _sorted_after(left)]


def _links(rows: Rows, order: Order) -> dict[int, int]:
    """The knot straight below each knot."""
    lengths = _lengths(rows)
    parting, joining = _crowds(rows)

    def lanes(step: RouteSegment) -> int:
        return (rows.knots[step.upper].role == "lane") + (rows.knots[step.lower].role == "lane")

    def rank(step: RouteSegment) -> tuple[int, int]:
        return (-2, 0) if lanes(step) == 2 else (lanes(step), -lengths[step])

    down: dict[int, int] = {}
    taken: set[int] = set()
    chosen: dict[int, list[tuple[int, int]]] = {}  # by upper row: places of both ends
    for step in sorted(rows.steps, key=rank):
        bent = step.skip or step.upper in parting or step.lower in joining
        if (bent and lanes(step) < 2) or step.upper in down or step.lower in taken:
            continue
        a, b = order.place[step.upper], order.place[step.lower]
        others = chosen.setdefault(rows.row[step.upper], [])
        if all((a - c) * (b - d) > 0 for c, d in others):
            down[step.upper] = step.lower
            taken.add(step.lower)
            others.append((a, b))
    return down


def _lengths(rows: Rows) -> dict[RouteSegment, int]:
    """The length of the longest way through each step, in boxes."""
    before, behind = [0] * len(rows.knots), [0] * len(rows.knots)
    for knot in rows.forward:
        for reader in rows.readers[knot]:
            before[reader] = max(before[reader], before[knot] + 1)
    for knot in reversed(rows.forward):
        behind[knot] = max((behind[r] + 1 for r in rows.readers[knot]), default=0)
    found = {}
    for step in rows.steps:
        source, targets = rows.routes[step.route]
        ends = targets if rows.knots[step.lower].role == "lane" else (step.lower,)
        found[step] = before[source] + max(behind[t] for t in ends)
    return found


def _crowds(rows: Rows) -> tuple[set[int], set[int]]:
    """Knots at which many branches part, and at which they join."""
    parting: dict[int, set[int]] = {}
    joining: dict[int, set[int]] = {}
    for step in rows.steps:
        if not step.skip:
            parting.setdefault(step.upper, set()).add(step.lower)
            joining.setdefault(step.lower, set()).add(step.upper)
    return (
        {knot for knot, others in parting.items() if len(others) >= CROWD},
        {knot for knot, others in joining.items() if len(others) >= CROWD},
    )


def _sorted_after(left: list[set[int]]) -> list[int]:
    """Numbers such that each comes after those of its set.

    There is no cycle: columns are intervals of rows, two of them have the same order in all rows they share,
    and a cycle of intervals would have a chord.
    """
    placed: dict[int, None] = {}
    for start in range(len(left)):
        stack = [start]
        while stack:
            waiting = sorted(left[stack[-1]] - placed.keys())
            if waiting:
                stack += waiting
            else:
                placed[stack.pop()] = None
    return list(placed)
