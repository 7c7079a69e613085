"""The context of a step: its tiles, their pixels, the values between tiles, and how one tile is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outcore.graph.record.recording import Context, Ref
from outcore.memory.offload.worker_threads import read_ahead
from outcore.ops.region import Region, sizes
from outcore.stream.call import RuleContext
from outcore.stream.execute.map_store import MapStore
from outcore.stream.execute.tile_classes import StreamTile, TileClasses
from outcore.stream.execute.tile_dedup import colour
from outcore.stream.execute.tile_run import run_tile
from outcore.stream.execute.tile_schedule import PassStep, TileSchedule
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass, TilePasses
from outcore.stream.rules.border import sliced
from outcore.stream.source import StreamedImage


@dataclass(frozen=True)
class PrefetchedPixels:
    """What was read for a tile, by a prefetching thread."""

    crops: Mapping[str, torch.Tensor]
    """Of the images, as they are stored; empty for a tile whose colours were known."""
    colours: Hashable | None = None
    """The colours of images that are each of one colour; None if one is not. Found by the thread that read them, so
    that the one that launches kernels need not."""
    beside: torch.Tensor | None = None
    """Other data that the tile takes (its target)."""

    @property
    def bytes(self) -> int:
        """The bytes of the images."""
        return sum(c.numel() * c.element_size() for c in self.crops.values())


@dataclass(frozen=True)
class TileOptions:
    """How tiles are run."""

    workers: int = 0
    """Threads that prefetch; 0 to read when needed."""
    duplicates: bool = True
    """Compute tiles of equal, constant pixels once."""
    cache_bytes: int = 0
    """Host memory for pixels that a later pass reads again."""


@dataclass
class TileCounts:
    """What was run."""

    forward: int = 0
    backward: int = 0
    reused: int = 0
    """Tiles that equal one computed before, forward and backward."""
    waited_s: float = 0.0
    """Seconds in which a tile was to be computed and its pixels were not there."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """The intervals of waiting, on the clock of `time.perf_counter`: between two of them, a tile is computed."""
    reads: list[tuple[str, float, float]] = field(default_factory=list)
    """Thread, begin and end of every read of a tile's pixels."""
    order: list[tuple[int, int, bool]] = field(default_factory=list)
    """Pass and tile, and whether with gradients, as they came."""


@dataclass
class StepContext:
    """The tiles of one step."""

    network: RegionNetwork
    streaming: TilePasses
    kinds: Sequence[TileClasses]
    """The tiles of every stage."""
    schedule: TileSchedule
    """What is executed, in order."""
    images: Mapping[str, StreamedImage]
    """Streamed inputs."""
    others: Mapping[str, torch.Tensor]
    """Inputs that every tile gets whole."""
    wants: frozenset[str]
    """Inputs whose gradient is wanted."""
    device: torch.device
    context: Context
    seed: int
    options: TileOptions = field(default_factory=TileOptions)
    counts: TileCounts = field(default_factory=TileCounts)

    def __post_init__(self) -> None:
        map_devices = {m: torch.device("cpu") for m in self.schedule.on_host}
        self.store = MapStore(self.device, map_devices, dict(self.others))
        self.given = RuleContext(self.seed)
        self.cached: dict[Hashable, PrefetchedPixels] = {}
        self.cached_bytes = 0
        self.lock = threading.Lock()

    def plans(self, step: PassStep) -> Iterator[StreamTile]:
        """The tiles of a pass, in the order of its script."""
        return map(self.kinds[step.index].at, step.tiles)

    def read(
        self, step: PassStep, plans: Iterable[StreamTile], beside: Callable[[StreamTile], torch.Tensor] | None = None
    ) -> Iterator[tuple[StreamTile, PrefetchedPixels]]:
        """Each tile with what its images hold there, read ahead; the waiting is counted.

        Args:
            step: whose images, and how many tiles ahead.
            plans: those of its tiles that are computed.
            beside: something else that a tile takes, read ahead as well.
        """
        images = [name for name in self.streaming.stages[step.index].sources if name in self.images]

        def read(plan: StreamTile) -> PrefetchedPixels:
            return pixels(plan) if beside is None else replace(pixels(plan), beside=self._ready(beside(plan)))

        def pixels(plan: StreamTile) -> PrefetchedPixels:
            place = tuple((name, plan.regions[name]) for name in images if name in plan.regions)
            if (held := self.cached.get(place)) is not None:
                return held
            if self._alike and None not in (known := {n: self.images[n].colour(r) for n, r in place}).values():
                return PrefetchedPixels({}, tuple(known.items()))
            start = time.perf_counter()
            crops = {name: self.images[name].read(region) for name, region in place}
            if (colours := self._colours(crops)) is None:
                crops = {name: self._ready(crop) for name, crop in crops.items()}
            found = PrefetchedPixels(crops, colours)
            self.counts.reads.append((threading.current_thread().name, start, time.perf_counter()))
            with self.lock:
                if self.cached_bytes + found.bytes <= self.options.cache_bytes:
                    self.cached[place] = found
                    self.cached_bytes += found.bytes
            return found

        tiles = read_ahead(plans, read, step.ahead)
        while True:
            start = time.perf_counter()
            tile = next(tiles, None)
            self.counts.waits.append((start, time.perf_counter()))
            self.counts.waited_s += self.counts.waits[-1][1] - start
            if tile is None:
                return
            self.counts.order.append((step.index, tile[0].index, step.gradient))
            yield tile
            del tile

    def _ready(self, crop: torch.Tensor) -> torch.Tensor:
        """What was prefetched, in pinned memory where the device copies asynchronously."""
        there = self.device.type == "cuda" and self.options.workers and crop.device.type == "cpu"
        return crop.contiguous().pin_memory() if there else crop

    @property
    def _alike(self) -> bool:
        """Whether tiles of equal pixels are computed once."""
        return self.options.duplicates and not self.wants

    def _colours(self, crops: Mapping[str, torch.Tensor]) -> Hashable | None:
        """The colours of a constant tile; pixels on a GPU are not checked, which would synchronise with it."""
        if not self._alike or any(crop.is_cuda for crop in crops.values()):
            return None
        found = {name: colour(crop) for name, crop in crops.items()}
        return None if None in found.values() else tuple(found.items())

    def duplicate_key(self, stage: TilePass, plan: StreamTile, pixels: PrefetchedPixels) -> Any:
        """The key that duplicate tiles have in common; None for a tile that cannot have duplicates."""
        if pixels.colours is None or set(stage.sources) - set(self.images):
            return None
        return pixels.colours, plan.kind

    def load(self, stage: TilePass, plan: StreamTile, pixels: PrefetchedPixels) -> dict[str, torch.Tensor]:
        """All that a tile takes, on the device: images prepared, regions of maps, global values."""
        found = {}
        for name in (*stage.sources, *stage.smalls):
            if (region := plan.regions.get(name)) is None:
                continue
            if name in self.images:
                crop = pixels.crops[name] if name in pixels.crops else self._plain(name, region)
                moved = crop.to(self.device, non_blocking=True) if crop.device != self.device else crop
                found[name] = self.images[name].prepare(moved).detach()
            else:
                found[name] = self.store.read(name, region).detach()
        return found

    def _plain(self, name: str, region: Region) -> torch.Tensor:
        """A crop that is known to be the same at every pixel, from one of them."""
        axes = self.network.axes[name]
        corner = tuple((a, b if axis is None else a + 1) for (a, b), axis in zip(region, axes, strict=True))
        return self.images[name].read(corner).to(self.device).expand(sizes(region)).contiguous()

    def compute(
        self,
        stage: TilePass,
        tile: StreamTile,
        loaded: Mapping[str, torch.Tensor],
        state: Mapping[Ref, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Each target's part of one tile."""
        plan = tile.plan
        made = run_tile(self.network, stage, plan, loaded, state, self.given)
        return {
            name: sliced(made[stage.targets[name]], plan.regions[stage.targets[name]], region)
            for name, region in plan.targets.items()
        }

    def state_of(self, stage: TilePass) -> dict[Ref, torch.Tensor]:
        """The parameters, buffers and constants of a stage."""
        return {ref: self.network.state(ref) for n in stage.nodes for ref in n.operands if ref.kind != "value"}

    def is_wanted(self, name: str) -> bool:
        """Whether the gradient of a source or a global value is needed."""
        if name in self.network.graph.inputs:
            return name in self.wants
        return self.network.dtypes[name].is_floating_point
