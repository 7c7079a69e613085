"""How a slide is run within a budget, all of it counted: tiles of the network, and what reading the slide takes.

On a CPU the budget bounds together

    the network's tile    as planned (`outcore.stream.plan_tiles`)
    kernels               copies in another order that convolutions make: half of the tile, as was measured
    read-ahead            pixels of the tile that is computed and of those being read
    decoding              a stored tile, what is made of it and a copy, for each thread that reads
    kept tiles            the cache of decoded tiles, an eighth of the budget at most

and on a GPU its own memory holds the first, while the rest is held to the same number on the host. First the threads
that read ahead are given up, then the tile becomes smaller; what does not fit even so is refused with the smallest
budget that would do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outcore.data import Batch, Slide, tile_cache
from outcore.errors import PlanError
from outcore.graph import Graph, capture
from outcore.infer.network import InferNetwork
from outcore.machine.units import format_bytes
from outcore.stream import stream
from outcore.stream.plan.plan import StreamPlan, plan_tiles
from outcore.stream.streamed import Streamed

__all__ = ["Fitted", "decoding_bytes", "fit"]

_CACHE_BYTES = 256 << 20
_CACHE_SHARE = 8
_COPIES = 3
"""Copies of a tile while it is decoded: its bytes, its pixels, and those with channels first."""
_TRIES = 4


@dataclass(frozen=True)
class Fitted:
    """A streamed network for images of one size, and what it takes."""

    streamed: Streamed
    plan: StreamPlan
    is_map: bool
    fingerprint: str
    """Of the network's structure."""
    workers: int
    reading_bytes: int
    """Read-ahead, decoding and kept tiles, at most."""
    kernel_bytes: int
    """About how many bytes kernels take for themselves."""
    cache_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Predicted, of tensors and of reading together."""
        return self.plan.peak_bytes + self.kernel_bytes + self.reading_bytes


def decoding_bytes(slide: Slide) -> int:
    """Bytes that one thread takes to decode the largest tile of a slide."""
    layout = slide.layout
    if layout.format in ("array", "image"):
        return 0
    pixels = max(math.prod(level.tile) for level in layout.levels)
    return _COPIES * pixels * max(layout.channels, 1) * layout.dtype.itemsize


def held_bytes(slide: Slide) -> int:
    """Bytes that a slide holds as long as it is open: ordinary images are decoded whole."""
    layout = slide.layout
    return math.prod(slide.shape) * layout.dtype.itemsize if layout.format == "image" else 0


def fit(
    network: InferNetwork, slide: Slide, image: Batch, *, memory_bytes: int, statistics: bool = False, workers: int = 2
) -> Fitted:
    """Choose tiles and threads for an image.

    Raises:
        PlanError: the budget is too small; says the smallest that would do.
    """
    graph = capture(network.model, [torch.empty(image.shape, device="meta")])
    network.check_output(graph)
    dense = stream(network.model, tile=1 << 40, statistics=statistics).is_map(image)
    shared = network.device.type == "cpu"
    itemsize = torch.empty(0, dtype=image.sources[0].dtype, device="cpu").element_size()
    whole = sum(math.prod(level.size) for level in slide.levels) * slide.layout.channels * slide.layout.dtype.itemsize
    cache = min(_CACHE_BYTES, memory_bytes // _CACHE_SHARE, whole)
    refused: PlanError | None = None
    for threads in sorted({workers, min(workers, 1), 0}, reverse=True):
        fixed = held_bytes(slide) + cache + decoding_bytes(slide) * max(1, threads)
        try:
            plan, ahead = _plan(graph, memory_bytes, fixed, itemsize * (threads + 1), statistics, dense, shared)
        except PlanError as error:
            refused = error
            continue
        streamed = plan.apply(network.model, workers=threads)
        return Fitted(
            streamed, plan, dense, graph.fingerprint, threads, fixed + ahead, _kernels(plan) if shared else 0, cache
        )
    assert refused is not None
    raise _refusal(slide, memory_bytes, fixed - cache, refused)


def _plan(
    graph: Graph, memory: int, fixed: int, per_pixel: int, statistics: bool, dense: bool, shared: bool
) -> tuple[StreamPlan, int]:
    """The fastest plan that fits beside what reading takes, and the bytes of its read-ahead."""
    rest = (memory - fixed) * 2 // 3 if shared else memory
    for _ in range(_TRIES):
        plan = plan_tiles(graph, memory=max(1, rest), training=False, statistics=statistics, dense=dense)
        ahead = plan.bytes.read * per_pixel
        beside = fixed + ahead + (_kernels(plan) if shared else 0)
        if beside + (plan.peak_bytes if shared else 0) <= memory:
            return plan, ahead
        rest = memory - beside if shared else memory
    refused = PlanError("reading ahead does not fit")
    refused.least_bytes = plan.peak_bytes + _kernels(plan) + ahead
    raise refused


def _kernels(plan: StreamPlan) -> int:
    return plan.bytes.tile_forward // 2


def _refusal(slide: Slide, memory: int, decoding: int, error: PlanError) -> PlanError:
    """The planner's error, with the memory for reading added."""
    tiles = error.least_bytes or 0
    # Kernels take half as much again, reading ahead some, and an eighth of the budget is for kept tiles.
    beside = math.ceil(tiles * 0.7)
    least = math.ceil((decoding + tiles + beside) * _CACHE_SHARE / (_CACHE_SHARE - 1))
    kept = least - decoding - tiles - beside
    size = " x ".join(map(str, max((level.tile for level in slide.levels), key=math.prod)[::-1]))
    made = PlanError(
        f"{slide.name} does not fit into --memory {format_bytes(memory)}: the smallest tile of the network takes "
        f"{format_bytes(tiles)}, its kernels and pixels read ahead {format_bytes(beside)}, decoding the slide, stored "
        f"in tiles of {size} px, {format_bytes(decoding)}, decoded tiles that are kept {format_bytes(kept)}; give at "
        f"least {format_bytes(least)}"
    )
    made.least_bytes = least
    return made


def bound_cache(fitted: Fitted) -> None:
    """Limit the cache of decoded tiles to what was counted."""
    tile_cache.limit_bytes = fitted.cache_bytes
