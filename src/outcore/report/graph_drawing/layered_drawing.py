"""A layered drawing without sizes: which box stands in which row, in which order, straight above which other.

The method is Sugiyama's (K. Sugiyama, S. Tagawa, M. Toda: *Methods for visual understanding of hierarchical
system structures*, 1981), fitted to networks, which are long main lines with branches and skips:

*Rows and lanes* (`outcore.report.graph_drawing.layer_assignment`). Each box stands below all it reads from. A wire that
passes rows gets a lane, a place in each of them, so it never runs through a box. *Order*
(`outcore.report.graph_drawing.crossing_reduction`). Branches stand side by side in the order of the code, lanes of
skips to the right of what they skip; other orders are tried only where that leaves crossings. *Columns*
(`outcore.report.graph_drawing.columns`). Lanes and the longest ways through the network become straight vertical lines.

All this depends on the wires of one container only, not on which boxes are open nor on how large they are
drawn. It is computed once and shipped with the page; only the step from here to coordinates exists in two
languages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outcore.report.graph_drawing.columns import columns
from outcore.report.graph_drawing.crossing_reduction import Order
from outcore.report.graph_drawing.layer_assignment import Rows
from outcore.report.graph_drawing.routes import Knot, RouteSegment, WireRoute

__all__ = ["Scheme", "arrange"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The drawing of one container without sizes."""

    knots: tuple[Knot, ...]
    """Boxes first, by number."""
    rows: tuple[tuple[int, ...], ...]
    """Knots from left to right."""
    steps: tuple[RouteSegment, ...]
    columns: tuple[tuple[int, ...], ...]
    """Knots straight above each other, from the top; listed after those that have to be left of them."""
    crossings: int


@lru_cache(maxsize=4096)
def arrange(
    boxes: int,
    routes: tuple[WireRoute, ...],
    top: tuple[int, ...] | None = None,
    bottom: tuple[int, ...] | None = None,
) -> Scheme:
    """Arrange boxes.

    Args:
        boxes: how many; numbered such that routes go from lower to higher numbers.
        routes: the wires between them.
        top: order of the routes that enter, if it is given from outside.
        bottom: order of the routes that leave.
    """
    rows = Rows(boxes, routes)
    order = Order(rows, top, bottom)
    return Scheme(
        knots=tuple(rows.knots),
        rows=tuple(tuple(row) for row in order.rows if row),
        steps=tuple(rows.steps),
        columns=tuple(columns(rows, order)),
        crossings=order.crossings(),
    )
