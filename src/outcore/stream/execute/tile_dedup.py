"""Identical tiles, computed once.

A slide is mostly glass: tiles of one colour, which compute the same from equal pixels. Such tiles are *duplicates*. The
first is computed; its pieces are copied to the others' places. In backward the gradients of all duplicates are added up
and sent through one of them: the tile's backward is linear in the gradient, so the sum of the tiles' gradients is the
gradient of the sum. Exact, as long as nothing depends on the place: a random layer does, and its tiles have no
duplicates.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outcore.ops.region import Region, sizes
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.tiles import TilePlan

if TYPE_CHECKING:
    from outcore.stream.execute.tile_classes import StreamTile

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass
class IdenticalTiles:
    """Tiles that are the same."""

    plans: list[StreamTile]
    made: Mapping[str, torch.Tensor] | None
    """What the first of them computed; dropped after the pass."""


@dataclass
class TileDedup:
    """The groups of identical tiles of one stage, in the order of their first tiles."""

    groups: list[IdenticalTiles] = field(default_factory=list)
    by_key: dict[Hashable, IdenticalTiles] = field(default_factory=dict)

    def find(self, key: Hashable | None) -> IdenticalTiles | None:
        """The group of a key, if there is one."""
        return None if key is None else self.by_key.get(key)

    def found(self, key: Hashable | None, plan: StreamTile, made: Mapping[str, torch.Tensor]) -> None:
        """Start a group with its first tile."""
        identical = IdenticalTiles([plan], made if key is not None else None)
        self.groups.append(identical)
        if key is not None:
            self.by_key[key] = identical

    def forget(self) -> None:
        """Drop the results of tiles after the pass, and keep the groups."""
        for identical in self.groups:
            identical.made = None
        self.by_key.clear()


def colour(crop: torch.Tensor) -> Hashable | None:
    """The values of a crop that is the same at every pixel; None if it is not."""
    first = crop[(slice(None), slice(None), *(slice(0, 1),) * (crop.dim() - 2))]
    middle = crop[(slice(None), slice(None), *(slice(n // 2, n // 2 + 1) for n in crop.shape[2:]))]
    last = crop[(slice(None), slice(None), *(slice(n - 1, n) for n in crop.shape[2:]))]
    if not torch.equal(first, middle) or not torch.equal(first, last):
        return None
    dims = tuple(range(2, crop.dim()))
    # torch has no extremes of wide unsigned numbers; bits that are all equal are so under any name.
    seen, one = (x.view(_SIGNED[x.dtype]) if x.dtype in _SIGNED else x for x in (crop, first))
    if not torch.equal(seen.amin(dims, keepdim=True), one) or not torch.equal(seen.amax(dims, keepdim=True), one):
        return None
    return tuple(first.flatten().tolist())


def signature(stage: TilePass, plan: TilePlan) -> Hashable:
    """Everything that a tile's arithmetic depends on, except the values it reads."""
    shapes = tuple(
        (v, sizes(r), None if v in stage.sources else _offset(plan, stage, v)) for v, r in plan.regions.items()
    )
    inside = tuple(_relative(plan.regions[stage.targets[t]], r) for t, r in plan.targets.items())
    return shapes, inside, tuple(plan.targets), repr(plan.place), _cuts(stage, plan)


def _offset(plan: TilePlan, stage: TilePass, value: str) -> Region | None:
    """The position of a global value, which is read at absolute places."""
    return plan.regions[value] if value in stage.smalls else None


def _cuts(stage: TilePass, plan: TilePlan) -> Hashable:
    """Where each node reads in what is held; for parameters, the absolute place."""
    return tuple(
        _relative(plan.regions[ref.name], region) if ref.kind == "value" else region
        for node in stage.nodes
        if node.output in plan.needs
        for ref, region in zip(node.operands, plan.needs[node.output], strict=True)
    )


def _relative(held: Region, region: Region) -> Region:
    return tuple((lo - a, hi - a) for (a, _), (lo, hi) in zip(held, region, strict=True))
