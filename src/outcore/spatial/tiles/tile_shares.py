"""Which tiles of every pass are a rank's, and who needs what they make.

A grid of ranks that stream takes the tiles of one device and shares them out: those over a rank's part are its own. The
ranks run by it (`outcore.spatial.tiles.run_tiles`), and what they take is predicted from it
(`outcore.spatial.tiles.tile_forecast`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from outcore.ops.region import Region, cover
from outcore.spatial.parts import PartGrid
from outcore.stream.execute.tile_classes import TileClasses
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass, TilePasses

__all__ = ["TileShares"]


@dataclass(frozen=True)
class TileShares:
    """The tiles of all passes, shared out over a grid of ranks."""

    network: RegionNetwork
    streaming: TilePasses
    kinds: Sequence[TileClasses]
    grid: PartGrid

    @cached_property
    def tiles(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By rank and pass, the places of its tiles among all of that pass."""
        return tuple(tuple(self._over(kinds, rank) for kinds in self.kinds) for rank in range(len(self.grid)))

    def _over(self, kinds: TileClasses, rank: int) -> tuple[int, ...]:
        at, counts = self.grid.position(rank), kinds.cut.counts
        if any(at[len(counts) :]):  # along an axis that has no tiles, all of it is the first rank's
            return ()
        spans = [self.grid.interval(axis, at[axis], n) for axis, n in enumerate(counts)]
        return tuple(
            index
            for index, number in enumerate(kinds.numbers)
            if all(lo <= k < hi for k, (lo, hi) in zip(number, spans, strict=True))
        )

    @cached_property
    def read_later(self) -> frozenset[str]:
        """Values that later passes, or the global nodes before them, start from: whole on every rank."""
        stages = self.streaming.stages
        read = {v for stage in stages for v in (*stage.sources, *stage.smalls)}
        return frozenset(read | {v for stage in stages for n in stage.globals for v in n.values})

    def readers(self, name: str) -> range:
        """The ranks that need all of a map: the first, or all."""
        return range(len(self.grid) if name in self.read_later else 1)

    def made(self, index: int, name: str, rank: int) -> Region | None:
        """The region of a pass's map that a rank makes."""
        kinds, stage = self.kinds[index], self.streaming.stages[index]
        found: Region | None = None
        for tile in self.tiles[rank][index]:
            region = kinds.cut.region(self.network, stage.targets[name], kinds.numbers[tile])
            if region is not None:
                found = cover(found, region)
        return found

    def graded(self, name: str, rank: int) -> Region | None:
        """The region of a boundary value's gradient that a rank needs: of a map that no pass reads, what it made."""
        made_by = {v: index for index, stage in enumerate(self.streaming.stages) for v in stage.maps}
        if name in made_by and name not in self.read_later:
            return self.made(made_by[name], name, rank)
        return tuple((0, n) for n in self.network.shapes[name])

    def read(self, stage: TilePass) -> list[str]:
        """What a pass reads and may send gradients to, beside the image."""
        inputs = set(self.network.graph.inputs)
        return [n for n in dict.fromkeys((*stage.sources, *stage.smalls)) if n not in inputs]
