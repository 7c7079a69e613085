"""All ways to stream a network that are worth considering, each with its time and its bytes.

A way is a boundary, a tile size, maps that are kept between passes (and where), and policies for the untiled tail. Its
time is found by counting (`outcore.stream.plan.time_model`); its bytes roughly at first, and for those that may be
chosen by running their largest tiles on fake tensors (`outcore.stream.plan.tile_memory`).

Which maps to keep matters only where there are several passes. Keeping the map that a norm's statistics are taken of
saves running all that is before it again, and maps get small with depth: so it is none, all, or all up to some size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from outcore.cost.costs import Costs
from outcore.errors import StreamError
from outcore.graph.parts import ancestors
from outcore.graph.structure import device_of
from outcore.ops.region import elements
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.choose import CandidateOutline, TileCandidate
from outcore.stream.plan.passes import TilePasses, divide
from outcore.stream.plan.prepared import PreparedStream, cut_up, divided
from outcore.stream.plan.step_figures import HOST_BYTES_PER_S
from outcore.stream.plan.tile_memory import StreamBytes, largest_tile, predict_bytes, tile_bytes
from outcore.stream.plan.tiles import Grid
from outcore.stream.plan.time_model import TileTimes

_SMALLEST_TILE = 32
_STRIPS = 8
"""With more strips than this, squares always have less halo."""
_SURELY = 0.9
"""Tiles take at least this share of what an equal part of the whole would."""
_CROSSINGS = 5
"""Copies of a map on the host: written, read in two passes, and its gradient added to and read."""
_MANAGED = 1.25
"""The slowdown of policies for the untiled tail, before they are planned."""


@dataclass(frozen=True)
class StreamLimits:
    """What may be planned."""

    statistics: bool = False
    """Further passes for norms over the image."""
    training: bool = True
    dense: bool = False
    """The output leaves tile by tile."""
    policies: bool = False
    """Maps kept between passes, on the device or the host, and policies for the untiled rest."""
    device: str = "cpu"
    """The kind of device it will run on."""


class StreamCandidates:
    """The ways to stream one network."""

    def __init__(
        self, network: RegionNetwork, costs: Costs | None, allowed: StreamLimits, budget_bytes: int | None
    ) -> None:
        self.network, self.costs, self.allowed, self.budget_bytes = network, costs, allowed, budget_bytes
        self._bytes: dict[TileCandidate, StreamBytes] = {}
        self._rests: dict[tuple[str, ...] | None, UntiledTail] = {}
        self._divided: dict[tuple[tuple[str, ...] | None, tuple[str, ...]], TilePasses] = {}
        self.times = TileTimes(network, costs, training=allowed.training, dense=allowed.dense)

    def candidates(self) -> Iterator[TileCandidate]:
        """Each boundary with each choice of kept maps and each tile size."""
        for outline in self.outlines():
            yield from outline.candidates()

    def outlines(self) -> Iterator[CandidateOutline]:
        """The same, before times are computed, with lower bounds of them."""
        for boundary in self._boundaries():
            for keep in self._keeps(boundary):
                streaming = self.streaming(boundary, keep)
                least, seen = self._least(streaming), set()
                for tile in self._tiles():
                    grids = cut_up(self.network, streaming, tile)
                    if (shape := tuple(g.counts for g in grids)) not in seen:
                        seen.add(shape)
                        variants = partial(self._variants, boundary, keep, tile, streaming, grids)
                        yield CandidateOutline(*least(grids), variants)

    def by_hand(self, how: Mapping[str, Any]) -> TileCandidate:
        """One way, as `stream` takes it."""
        tile, boundary, keep = how["tile"], how["boundary"], tuple(how["keep"])
        tile = (tile,) * self.network.rank if isinstance(tile, int) else tile
        boundary = (boundary,) if isinstance(boundary, str) else boundary
        streaming = self.streaming(boundary, keep)
        seconds, _ = self.times.streamed(streaming, cut_up(self.network, streaming, tile))
        seconds += self.times.tail_s(streaming)
        made = TileCandidate(boundary, tile, seconds, 0, keep, how["maps_on_host"], managed=bool(how["rest"]))
        if how["rest"]:
            self._rests[boundary] = rest = UntiledTail(self.prepared(made))
            rest.plan(None, self.costs, how["rest"])
        return made

    def prepared(self, candidate: TileCandidate) -> PreparedStream:
        """The network prepared for one candidate."""
        return divided(
            self.network,
            tile=candidate.tile,
            boundary=candidate.boundary,
            statistics=self.allowed.statistics,
            keep=candidate.keep,
            on_host=candidate.on_host,
        )

    def bytes(self, candidate: TileCandidate) -> StreamBytes:
        """The peak of a candidate, found by running its largest tiles on fake tensors."""
        if candidate not in self._bytes:
            prepared = self.prepared(candidate)
            predicted = predict_bytes(
                prepared,
                training=self.allowed.training,
                dense=self.allowed.dense,
                on_host=candidate.on_host,
                rest=self.rest(candidate),
            )
            self._bytes[candidate] = replace(predicted, workspace=self._workspace(prepared))
        return self._bytes[candidate]

    def rest(self, candidate: TileCandidate) -> UntiledTail | None:
        """The untiled tail, with policies as the budget needs them."""
        if not candidate.managed:
            return None
        if candidate.boundary not in self._rests:
            rest = UntiledTail(self.prepared(candidate))
            rest.plan((self.budget_bytes or 2**62) - self._outside(candidate), self.costs)
            self._rests[candidate.boundary] = rest
        return self._rests[candidate.boundary]

    def streaming(self, boundary: tuple[str, ...] | None, keep: tuple[str, ...] = ()) -> TilePasses:
        """The passes up to a boundary."""
        if (boundary, keep) not in self._divided:
            self._divided[boundary, keep] = divide(
                self.network, boundary=boundary, statistics=self.allowed.statistics, keep=keep
            )
        return self._divided[boundary, keep]

    @cached_property
    def pixels(self) -> list[int]:
        """The pixels of the largest image."""
        sizes = [
            [n for n, a in zip(self.network.shapes[i], self.network.axes[i], strict=True) if a is not None]
            for i in self.network.inputs
        ]
        if not sizes:
            raise StreamError("no input is an image: (batch, channels, pixels...) is what can be streamed")
        return max(sizes, key=math.prod)

    # What there is to choose from

    def _boundaries(self) -> list[tuple[str, ...] | None]:
        """The furthest boundary, and one after each block near the top of the tree."""
        found: dict[frozenset[str], tuple[str, ...] | None] = {self.streaming(None).calls: None}
        if self.allowed.dense:
            return [None]
        blocks = [c.block for c in self.network.graph.calls.values()]
        near = dict.fromkeys(a for b in blocks for a in ([*ancestors(b), b])[:2] if a)
        for block in near if len(near) <= 60 else dict.fromkeys(n.split(".")[0] for n in near):
            try:
                streaming = self.streaming((block,))
            except StreamError:
                continue
            if len(streaming.boundary) <= 3:
                found.setdefault(streaming.calls, (block,))
        return list(found.values())

    def _tiles(self) -> Iterator[tuple[int, ...]]:
        """Equal numbers of tiles along every axis; where all runs in one pass, also a few strips."""
        for parts in _counts(max(self.pixels)):
            tile = tuple(max(-(-n // parts), 1) for n in self.pixels)
            yield tile
            if self.allowed.dense and 1 < parts <= _STRIPS and len(tile) > 1:
                yield tile[0], *self.pixels[1:]

    def _keeps(self, boundary: tuple[str, ...] | None) -> list[tuple[str, ...]]:
        """No maps; with several passes also those that statistics are taken of: all, and all up to some sizes."""
        stages = self.streaming(boundary).stages
        if len(stages) == 1 or not self.allowed.policies:
            return [()]
        operands = dict.fromkeys(r.values[0] for s in stages[:-1] for r in s.reductions)
        size = {v: self._map_bytes(v) for v in operands if v in self.network.nodes}
        steps = sorted(set(size.values()))
        limits = [steps[i * (len(steps) - 1) // 3] for i in range(4)] if len(steps) > 4 else steps
        return [(), *dict.fromkeys(tuple(v for v in size if size[v] <= most) for most in limits)]

    def _variants(
        self,
        boundary: tuple[str, ...] | None,
        keep: tuple[str, ...],
        tile: tuple[int, ...],
        streaming: TilePasses,
        grids: tuple[Grid, ...],
    ) -> Iterator[TileCandidate]:
        time_s, numbers = self.times.streamed(streaming, grids)
        tail_s, tail = self.times.tail_s(streaming), self._tail_bytes(streaming)
        tile_bytes = int(self._bytes_per_number * numbers)
        kept = sum(map(self._map_bytes, streaming.kept))
        most = self._rough(streaming, tile_bytes, kept, tail)
        yield TileCandidate(boundary, tile, time_s + tail_s, most, keep)
        if not self.allowed.policies or not self.allowed.training or self.budget_bytes is None:
            return
        if keep and self.allowed.device == "cuda":
            moved_s = _CROSSINGS * kept / HOST_BYTES_PER_S
            most = self._rough(streaming, tile_bytes, 0, tail)
            yield TileCandidate(boundary, tile, time_s + tail_s + moved_s, most, keep, on_host=True)
        here = device_of(self.network.model).type != "meta"  # policies are weighed by rates measured there
        if tail > 0.5 * self.budget_bytes and here:
            most = self._rough(streaming, tile_bytes, kept, tail // 4)
            yield TileCandidate(boundary, tile, time_s + _MANAGED * tail_s, most, keep, managed=True)

    def _least(self, streaming: TilePasses) -> Callable[[tuple[Grid, ...]], tuple[float, int]]:
        """Lower bounds of seconds and rough bytes of all variants, by their grids: without halos, and with equal
        tiles."""
        wholes = [
            self.times.streamed_stage(streaming, stage, cut)
            for stage, cut in zip(streaming.stages, cut_up(self.network, streaming, self.pixels), strict=True)
        ]
        tail_s, tail = self.times.tail_s(streaming), self._tail_bytes(streaming)
        kept = sum(map(self._map_bytes, streaming.kept))
        if self.allowed.policies:
            kept, tail = 0, tail // 4

        def least(grids: tuple[Grid, ...]) -> tuple[float, int]:
            seconds, numbers = tail_s, 0.0
            for (computing_s, issuing_s, most), cut in zip(wholes, grids, strict=True):
                seconds += _SURELY * computing_s + issuing_s * len(cut)
                numbers = max(numbers, _SURELY * most / len(cut))
            return seconds, self._rough(streaming, int(self._bytes_per_number * numbers), kept, tail)

        return least

    # Bytes, roughly

    def _rough(self, streaming: TilePasses, tile_bytes: int, kept: int, tail: int) -> int:
        boundary = 0 if self.allowed.dense else sum(map(self._map_bytes, streaming.passing))
        if self.allowed.training:
            held = max(kept + boundary + tail, 2 * kept + boundary + tile_bytes)
        else:
            held = kept + boundary + max(tile_bytes, tail)
        return held + self._weights

    def _tail_bytes(self, streaming: TilePasses) -> int:
        calls, values = self.network.graph.calls, self.network.graph.values
        outputs = [v for c in calls.values() if c.name not in streaming.calls for v in c.outputs]
        return sum(values[v].bytes for v in outputs if values[v].alias_of is None)

    def _map_bytes(self, value: str) -> int:
        return math.prod(self.network.shapes[value]) * self.network.dtypes[value].itemsize

    @cached_property
    def _bytes_per_number(self) -> float:
        """Bytes per element of a tile, forward and backward."""
        streaming = self.streaming(None)
        stage, cut = streaming.stages[-1], cut_up(self.network, streaming, self.pixels)[-1]
        plan = largest_tile(self.network, stage, cut)
        return tile_bytes(self.network, stage, plan, training=self.allowed.training).backward / plan.elements()

    @cached_property
    def _weights(self) -> int:
        return 2 * sum(p.numel() * p.element_size() for p in self.network.model.parameters())

    def _workspace(self, prepared: PreparedStream) -> int:
        """The workspace of an operation, from that measured for the whole image and the share of a tile."""
        if self.costs is None:
            return 0
        most = 0
        for stage, cut in zip(prepared.streaming.stages, prepared.grids, strict=True):
            plan = largest_tile(self.network, stage, cut)
            for node in stage.nodes:
                costs = [self.costs[call] for call in (node.call, *node.absorbed)]
                taken = max(max(c.workspace_forward_bytes, c.workspace_backward_bytes) for c in costs)
                if taken and (region := plan.regions.get(node.output)) is not None:
                    most = max(most, taken * elements(region) // max(1, math.prod(node.shape)))
        return most

    def _outside(self, candidate: TileCandidate) -> int:
        """Bytes that are held beside the tail while it runs, its own weights and the boundary not counted."""
        streaming = self.streaming(candidate.boundary, candidate.keep)
        kept = 0 if candidate.on_host else sum(map(self._map_bytes, streaming.kept))
        inside = {p for c in self.network.graph.calls.values() if c.name not in streaming.calls for p in c.parameters}
        named = dict(self.network.model.named_parameters())
        return kept + 2 * sum(p.numel() * p.element_size() for n, p in named.items() if n not in inside)


def _counts(pixels: int) -> list[int]:
    """Numbers of parts to cut an axis into: 1, 2, 3, 4, 6, 8, 12, ... as long as tiles are not tiny."""
    found, k = [1], 2
    while pixels // k >= _SMALLEST_TILE and k <= 1024:
        found += [k, 3 * k // 2]
        k *= 2
    return found
