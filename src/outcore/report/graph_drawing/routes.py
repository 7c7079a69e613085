"""What a layered drawing is made of: routes, the knots they are tied to, and the steps from row to row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Knot", "Role", "RouteSegment", "WireRoute"]

Role = Literal["box", "in", "out", "lane"]


@dataclass(frozen=True, slots=True)
class WireRoute:
    """A wire by numbers: from a box (none: from outside) to boxes, and perhaps to the outside."""

    source: int | None
    targets: tuple[int, ...]
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Knot:
    """Something that takes a place in a row: a box, a wire that enters or leaves, or the lane of a wire."""

    role: Role
    index: int
    """Number of the box, else of the route."""


@dataclass(frozen=True, slots=True)
class RouteSegment:
    """A piece of a route, from a knot to one in the next row."""

    upper: int
    lower: int
    route: int
    skip: bool
    """Whether it is part of a skip: a longer way leads to the same place."""
