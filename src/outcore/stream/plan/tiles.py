"""A partition of every target into tiles, and what one tile takes.

All targets of a stage are cut along the streamed axes into the same number of parts, at the same relative places, so
that tile k of a fine map lies over tile k of a coarse one. The parts of each target are disjoint and complete; what
they need of the image overlaps, by exactly the halo.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outcore.ops.region import Region, cover, elements
from outcore.stream.call import widening_rule
from outcore.stream.execute.border_padding import WidenedInput, contains
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.plan.passes import TilePass


@dataclass(frozen=True)
class Grid:
    """How many tiles along each streamed axis, and the sizes whose parts are equal."""

    counts: tuple[int, ...]
    reference: tuple[int, ...]

    def __len__(self) -> int:
        return math.prod(self.counts)

    def tiles(self) -> Iterator[tuple[int, ...]]:
        """Numbers of the tiles, row by row."""
        return itertools.product(*(range(c) for c in self.counts))

    def edge(self, axis: int, k: int, size: int) -> int:
        """Where tile k begins on something of this size."""
        n, count = self.reference[axis], self.counts[axis]
        at = min(k * -(-n // count), n)
        return at if size == n else (2 * at * size + n) // (2 * n)

    def region(self, network: RegionNetwork, value: str, tile: tuple[int, ...]) -> Region | None:
        """The part of a value that a tile covers; None if it is empty."""
        found = []
        for n, axis in zip(network.shapes[value], network.axes[value], strict=True):
            if axis is None or axis >= len(self.counts):
                found.append((0, n))
            else:
                found.append((self.edge(axis, tile[axis], n), self.edge(axis, tile[axis] + 1, n)))
        lacking = {a for a, c in enumerate(self.counts) if c > 1} - set(network.axes[value])
        if any(lo >= hi for lo, hi in found) or any(tile[a] for a in lacking):
            return None
        return tuple(found)


def grid(network: RegionNetwork, stage: TilePass, tile: Sequence[int]) -> Grid:
    """As many tiles as give each at most `tile` input pixels along each axis, halo not counted."""
    values = list(stage.targets.values())
    axes = sorted({a for v in values for a in network.axes[v] if a is not None})
    count = (max(axes) + 1) if axes else 0
    pixels = [0] * count
    for name in network.inputs:
        for n, axis in zip(network.shapes[name], network.axes[name], strict=True):
            if axis is not None and axis < count:
                pixels[axis] = max(pixels[axis], n)
    reference, counts = [], []
    for axis in range(count):
        lengths = [n for v in values for n, a in zip(network.shapes[v], network.axes[v], strict=True) if a == axis]
        n = min(lengths, default=1)
        wanted = min(max(1, -(-pixels[axis] // tile[axis])), n)
        reference.append(n)
        counts.append(-(-n // -(-n // wanted)))
    return Grid(tuple(counts), tuple(reference))


@dataclass(frozen=True)
class TilePlan:
    """The regions of one tile."""

    number: tuple[int, ...]
    targets: Mapping[str, Region]
    """By target: the part of the map, or of a reduction's operand."""
    regions: Mapping[str, Region]
    """By value: the region that is computed or read, excess included."""
    needs: Mapping[str, tuple[Region, ...]]
    """By node: the regions of its operands."""
    place: Any = None
    """Equal for tiles that compute the same with equal pixels."""
    widened: Mapping[str, WidenedInput] = field(default_factory=dict)
    """By node: how it runs on all that is held of its first operand."""

    def elements(self) -> int:
        """Elements in all values of the tile."""
        return sum(elements(r) for r in self.regions.values())


def plan_tile(
    network: RegionNetwork, stage: TilePass, cut: Grid, number: tuple[int, ...], *, excess: bool = True
) -> TilePlan | None:
    """The regions of a tile, found backwards from its targets; None if it has no part in any of them."""
    targets: dict[str, Region] = {}
    regions: dict[str, Region] = {}
    for target, value in stage.targets.items():
        if (region := cut.region(network, value, number)) is not None:
            targets[target] = region
            regions[value] = cover(regions.get(value), region)
    if not targets:
        return None
    return trace(stage.nodes, targets, regions, number, excess=excess)


def trace(
    nodes: Sequence[RegionNode],
    targets: Mapping[str, Region],
    wanted: Mapping[str, Region],
    number: tuple[int, ...] = (),
    *,
    excess: bool = True,
) -> TilePlan:
    """All regions that wanted ones depend on; where several nodes need parts of a value, the region that covers
    them."""
    regions = dict(wanted)
    needs: dict[str, tuple[Region, ...]] = {}
    places = []
    for node in reversed(nodes):
        if (out := regions.get(node.output)) is None or node.rule is None:
            continue
        needs[node.output] = found = node.rule.needs(out)
        places.append(node.rule.place(out))
        for ref, region in zip(node.operands, found, strict=True):
            if ref.kind == "value":
                regions[ref.name] = cover(regions.get(ref.name), region)
    widened = _widen(nodes, regions, needs) if excess else {}
    return TilePlan(number, targets, regions, needs, tuple(places), widened)


def _widen(
    nodes: Sequence[RegionNode], regions: dict[str, Region], needs: dict[str, tuple[Region, ...]]
) -> dict[str, WidenedInput]:
    """Let nodes run on all that is held where that saves copies; changes the regions in place."""
    found: dict[str, WidenedInput] = {}
    for node in nodes:
        rule, wanted = widening_rule(node.rule), needs.get(node.output)
        if wanted is None or rule is None or node.operands[0].kind != "value":
            continue
        out, held = regions[node.output], regions[node.operands[0].name]
        if (widened := rule.widened(held, out)) is None:
            continue
        added = [i for i, r in enumerate(node.operands) if i and r.kind == "value" and wanted[i] == out]
        if all(contains(regions[node.operands[i].name], widened.out) for i in added):
            rest = [widened.out if i in added else region for i, region in enumerate(wanted)]
            needs[node.output] = (held, *rest[1:])
            regions[node.output], found[node.output] = widened.out, widened
    return found
