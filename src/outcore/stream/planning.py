"""Choosing boundary and tile for a budget, from the graph alone.

    plan = outcore.stream.plan_tiles(outcore.capture(model, [(1, 3, 100_000, 100_000)]), memory="40GiB")
    streamed = plan.apply(model)

Time comes from costs per call (`outcore.estimate` for any machine, `outcore.measure` for this one), scaled by the
share of a call's output that a tile computes, halos included; without costs, from FLOPs and bytes by a plain ratio.
Bytes come from running the largest tile without memory (`outcore.stream.prediction`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from outcore.cost.costs import Costs
from outcore.errors import StreamError
from outcore.graph import Graph
from outcore.graph.parts import ancestors
from outcore.machine.units import format_bytes, parse_bytes
from outcore.ops.region import elements
from outcore.planner.tiles import Candidate, choose
from outcore.stream.network import Network, Node
from outcore.stream.prediction import StreamBytes, largest_tile, predict_bytes, tile_bytes
from outcore.stream.prepared import Prepared, bound, divided
from outcore.stream.stages import Stage
from outcore.stream.tiles import Grid, TilePlan, plan_tile

if TYPE_CHECKING:
    from outcore.stream.streamed import Streamed

__all__ = ["StreamPlan", "plan_tiles"]

_SMALLEST_TILE = 64
_MARGIN = {"cuda": 0.08}
"""Share of the budget for what kernels take for themselves."""


@dataclass(frozen=True)
class StreamPlan:
    """How a network is streamed at one size."""

    boundary: tuple[str, ...] | None
    tile: tuple[int, ...]
    statistics: bool
    time_s: float
    """Predicted, in the unit of the costs."""
    bytes: StreamBytes
    tiles: int
    overlap: float
    """Numbers computed by all tiles of the last pass over those of the whole."""
    passes: int
    """Forward passes over the image."""
    rivals: tuple[Candidate, ...] = ()
    """The next best."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device."""
        return self.bytes.peak

    def apply(self, model: nn.Module, *, workers: int = 0) -> Streamed:
        """The model, streamed by this plan."""
        from outcore.stream.streamed import stream

        return stream(model, tile=self.tile, boundary=self.boundary, statistics=self.statistics, workers=workers)

    def document(self) -> dict[str, Any]:
        """What a `Plan` says under ``stream``."""
        boundary = None if self.boundary is None else list(self.boundary)
        return {"boundary": boundary, "tile": list(self.tile), "statistics": self.statistics}

    def __str__(self) -> str:
        where = "the whole local part" if self.boundary is None else f"up to {', '.join(self.boundary)}"
        size = " x ".join(map(str, self.tile))
        return (
            f"stream {where} in {self.tiles} tiles of {size} px ({self.overlap:.2f}x the numbers), forward passes: "
            f"{self.passes}, predicted peak {format_bytes(self.peak_bytes)}"
        )


def plan_tiles(
    graph: Graph,
    *,
    memory: str | int | None,
    costs: Costs | None = None,
    statistics: bool = False,
    fold: bool = True,
    training: bool = True,
    dense: bool = False,
) -> StreamPlan:
    """Choose boundary and tile size for the fastest step within a budget.

    >>> import outcore
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> plan = plan_tiles(outcore.capture(net, [(1, 3, 20_000, 20_000)]), memory="256MiB")
    >>> plan.peak_bytes <= 256 * 2**20
    True

    Args:
        graph: captured at the size of the image, with its model.
        memory: the most a step may hold on the device ("8GiB", bytes); none for the fastest.
        costs: of the graph's calls on the machine that will run it.
        statistics: whether further passes for norms over the image may be planned.
        fold: whether frozen batch norms are folded.
        training: whether there is a backward pass.
        dense: whether the output leaves tile by tile (`Streamed.loss`, `Streamed.tiles`), in one pass.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
        StreamError: nothing can be streamed; names the block and the reason.
    """
    network = bound(graph, folded=fold)
    chooser = _Chooser(network, costs, statistics, training, dense)
    budget = None if memory is None else parse_bytes(memory) if isinstance(memory, str) else memory
    device = next((p.device.type for p in network.model.parameters()), "cpu")
    usable = None if budget is None else int(budget * (1 - _MARGIN.get(device, 0.0)))
    candidates = list(chooser.candidates())
    best, _ = choose(candidates, usable, lambda c: chooser.bytes(c).peak)
    prepared = chooser.prepared(best.boundary, best.tile)
    rivals = [c for c in sorted(candidates, key=lambda c: c.time_s) if c != best][:3]
    stage, cut = prepared.streaming.stages[-1], prepared.grids[-1]
    return StreamPlan(
        best.boundary,
        best.tile,
        statistics,
        best.time_s,
        chooser.bytes(best),
        len(cut),
        chooser.overlap(stage, cut),
        len(prepared.streaming.stages),
        tuple(rivals),
    )


class _Chooser:
    def __init__(self, network: Network, costs: Costs | None, statistics: bool, training: bool, dense: bool) -> None:
        self.network, self.costs = network, costs
        self.statistics, self.training, self.dense = statistics, training, dense
        self._bytes: dict[Candidate, StreamBytes] = {}
        self._ratio: float | None = None

    def prepared(self, boundary: tuple[str, ...] | None, tile: tuple[int, ...]) -> Prepared:
        return divided(self.network, tile=tile, boundary=boundary, statistics=self.statistics)

    def bytes(self, candidate: Candidate) -> StreamBytes:
        if candidate not in self._bytes:
            prepared = self.prepared(candidate.boundary, candidate.tile)
            self._bytes[candidate] = predict_bytes(prepared, training=self.training, dense=self.dense)
        return self._bytes[candidate]

    def candidates(self) -> Iterator[Candidate]:
        """Each boundary with each tile size."""
        sizes = [
            [n for n, a in zip(self.network.shapes[i], self.network.axes[i], strict=True) if a is not None]
            for i in self.network.inputs
        ]
        if not sizes:
            raise StreamError("no input is an image: (batch, channels, pixels...) is what can be streamed")
        pixels = max(sizes, key=math.prod)
        for boundary in self._boundaries():
            seen = set()
            for parts in _counts(max(pixels)):
                tile = tuple(max(-(-n // parts), 1) for n in pixels)
                prepared = self.prepared(boundary, tile)
                if (shape := tuple(g.counts for g in prepared.grids)) in seen:
                    continue
                seen.add(shape)
                yield Candidate(boundary, tile, self._time(prepared), self._rough(prepared))

    def _boundaries(self) -> list[tuple[str, ...] | None]:
        """As far as it goes, and after each block near the top of the tree."""
        found: dict[frozenset[str], tuple[str, ...] | None] = {}
        furthest = self.prepared(None, (2**62,) * self.network.rank)
        found[furthest.streaming.calls] = None
        if self.dense:
            return [None]
        blocks = [c.block for c in self.network.graph.calls.values()]
        near = dict.fromkeys(a for b in blocks for a in ([*ancestors(b), b])[:2] if a)
        for block in near if len(near) <= 60 else dict.fromkeys(n.split(".")[0] for n in near):
            try:
                streaming = self.prepared((block,), (2**62,) * self.network.rank).streaming
            except StreamError:
                continue
            if len(streaming.boundary) <= 3:
                found.setdefault(streaming.calls, (block,))
        return list(found.values())

    def _time(self, prepared: Prepared) -> float:
        total = 0.0
        for stage, cut in zip(prepared.streaming.stages, prepared.grids, strict=True):
            once = self.dense and stage is prepared.streaming.stages[-1]
            passes = (1 if once or not self.training else 2, 1 if self.training else 0)
            for plan, times in self._classes(stage, cut):
                for node in stage.nodes:
                    if (region := plan.regions.get(node.output)) is not None:
                        share = times * elements(region) / max(1, math.prod(node.shape))
                        forward, backward = self._cost(node)
                        total += share * (passes[0] * forward + passes[1] * backward)
        streamed = prepared.streaming.calls
        for call in self.network.graph.calls.values():
            if call.name not in streamed:
                forward, backward = self._call_cost(call.name)
                total += forward + (backward if self.training else 0.0)
        return total

    def _cost(self, node: Node) -> tuple[float, float]:
        if node.absorbed:  # a folded norm costs nothing of its own
            costs = [self._call_cost(c) for c in node.absorbed]
            return sum(f for f, _ in costs), sum(b for _, b in costs)
        return self._call_cost(node.call)

    def _call_cost(self, call: str) -> tuple[float, float]:
        if self.costs is not None:
            cost = self.costs[call]
            return (
                cost.forward.median_s if cost.forward is not None else 0.0,
                cost.backward.median_s if cost.backward is not None else 0.0,
            )
        found = self.network.graph.calls[call]
        values = self.network.graph.values
        moved = sum(values[v].bytes for v in (*found.inputs, *found.outputs))
        weights = sum(math.prod(t.shape) for p in found.parameters if (t := _tensor(self.network.model, p)) is not None)
        pixels = sum(math.prod(values[v].shape[2:]) for v in found.outputs if len(values[v].shape) > 2)
        forward = moved / 1e12 + 2 * weights * pixels / 1e14
        return forward, 2 * forward

    def _classes(self, stage: Stage, cut: Grid) -> Iterator[tuple[TilePlan, int]]:
        """Tiles that take the same, each with how many there are: those at the edges and those between."""
        along = []
        for count in cut.counts:
            if count <= 3:
                along.append([(k, 1) for k in range(count)])
            else:
                along.append([(0, 1), (count // 2, count - 2), (count - 1, 1)])
        for numbers in itertools.product(*along):
            plan = plan_tile(self.network, stage, cut, tuple(k for k, _ in numbers))
            if plan is not None:
                yield plan, math.prod(n for _, n in numbers)

    def _rough(self, prepared: Prepared) -> int:
        """Peak bytes by the number of elements in a tile."""
        if self._ratio is None:
            stage, cut = prepared.streaming.stages[-1], prepared.grids[-1]
            plan = largest_tile(self.network, stage, cut)
            self._ratio = tile_bytes(self.network, stage, plan, training=self.training).backward / plan.elements()
        tile = max(
            largest_tile(self.network, s, g).elements()
            for s, g in zip(prepared.streaming.stages, prepared.grids, strict=True)
        )
        calls, values = self.network.graph.calls, self.network.graph.values
        rest = sum(
            values[v].bytes
            for c in calls.values()
            if c.name not in prepared.streaming.calls
            for v in c.outputs
            if values[v].alias_of is None
        )
        names = {m for s in prepared.streaming.stages for m in s.maps}
        names -= set(prepared.streaming.boundary) if self.dense else set()
        maps = sum(math.prod(self.network.shapes[m]) * self.network.dtypes[m].itemsize for m in names)
        weights = sum(p.numel() * p.element_size() for p in self.network.model.parameters())
        held = max(rest + maps, 2 * maps + int(self._ratio * tile)) if self.training else maps + int(self._ratio * tile)
        return held + 2 * weights

    def overlap(self, stage: Stage, cut: Grid) -> float:
        """How many numbers all tiles compute, over those of the whole."""
        computed = sum(
            times * elements(plan.regions[n.output])
            for plan, times in self._classes(stage, cut)
            for n in stage.nodes
            if n.output in plan.regions
        )
        return computed / max(1, sum(math.prod(n.shape) for n in stage.nodes))


def _counts(pixels: int) -> list[int]:
    """Into how many parts to cut: 1, 2, 3, 4, 6, 8, 12, ... as long as tiles are not tiny."""
    found, k = [1], 2
    while pixels // k >= _SMALLEST_TILE and k <= 1024:
        found += [k, 3 * k // 2]
        k *= 2
    return found


def _tensor(model: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, last = name.rpartition(".")
    owner = model.get_submodule(holder)
    return owner._parameters.get(last)
