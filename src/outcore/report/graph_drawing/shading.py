"""Blocks shaded by a number: the darker, the more of the whole.

One scale for time, memory and policies, from white to blue, so that it also reads in grey. Numbers are shares of the
largest block; the scale below a picture says what that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outcore.cost.costs import Costs
from outcore.figure import bytes_unit, rectangle, text, time_unit
from outcore.graph.graph import Graph
from outcore.graph.parts import ancestors
from outcore.program.plan.document import Plan

__all__ = ["Shading", "memory_by_block", "mixed", "moved_by_block", "time_by_block"]

_LIGHT, _DARK = (244, 248, 251), (0, 90, 150)


@dataclass(frozen=True)
class Shading:
    """A number for every block, by path, and what it is."""

    values: Mapping[str, float]
    unit: str
    """A name; seconds and bytes are given in the unit that suits the largest."""

    @property
    def most(self) -> float:
        """The largest number."""
        return max(self.values.values(), default=0.0)

    def share(self, block: str) -> float:
        """Of the largest."""
        return self.values.get(block, 0.0) / self.most if self.most else 0.0

    def colour(self, block: str) -> str:
        """The fill of a block."""
        return mixed(self.share(block))

    def is_dark(self, block: str) -> bool:
        """Whether words on it must be white."""
        return self.share(block) > 0.55

    def scale(self, x: float, y: float) -> list[str]:
        """The scale, as a drawing."""
        name, most, unit = self.unit, self.most, ""
        if "time" in name:
            by, unit = time_unit(most)
            most /= by
        elif "memory" in name:
            by, unit = bytes_unit(most)
            most /= by
        steps = [rectangle(x + 12 * i, y, 12.5, 12, mixed(i / 9)) for i in range(10)]
        said = f"{name}: 0 to {most:.3g}{' ' + unit if unit else ''}"
        return [*steps, text(x + 130, y + 10, said, "small")]


def time_by_block(graph: Graph, costs: Costs) -> dict[str, float]:
    """Seconds of forward and backward in every block, with all that is inside."""
    return _added(graph, {name: cost.time_s for name, cost in costs.calls.items()})


def memory_by_block(graph: Graph, costs: Costs) -> dict[str, float]:
    """Bytes that every block keeps for backward."""
    kept = {name: {s.of: s.bytes for s in cost.saved if s.kind != "parameter"} for name, cost in costs.calls.items()}
    return _added(graph, {name: float(sum(of_one.values())) for name, of_one in kept.items()})


def moved_by_block(graph: Graph, plan: Plan) -> dict[str, float]:
    """Bytes in every block that a plan does not simply keep."""
    moved: dict[str, float] = {}
    for value, how in plan.policy.items():
        if how != "keep" and value in graph.values and (producer := graph.values[value].producer) is not None:
            moved[producer] = moved.get(producer, 0.0) + graph.values[value].bytes
    return _added(graph, moved)


def _added(graph: Graph, calls: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in calls.items():
        if name in graph.calls:
            block = graph.calls[name].block
            for path in (*ancestors(block), block):
                found[path] = found.get(path, 0.0) + value
    return found


def mixed(share: float) -> str:
    """The colour of a share between 0 and 1."""
    parts = (round(a + (b - a) * share) for a, b in zip(_LIGHT, _DARK, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)
