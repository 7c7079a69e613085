"""Grids of which every rank streams its part in tiles: the largest tiles whose step is within the memory.

An image that no grid holds can still be shared: each rank takes the tiles over its part
(`outcore.spatial.tiles.run_tiles`). Larger tiles compute fewer halos and hold more, so the tiles are the largest that
fit; a part is cut into whole numbers of them along each axis, which leaves all ranks as many, and the ranks are
arranged so that parts are nearly square. Where the batch can be divided, replicas of a smaller grid are looked at too,
down to one rank that streams samples of its own. Bytes are found by running tiles on fake tensors, which takes seconds:
of all sizes, those are tried that would fit if bytes grew with pixels.

Tiles are run forward twice, so a step takes at least what the arithmetic of that takes; where something else is known
to be faster, tiles are not looked at any closer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from outcore.errors import OutcoreError, PlanError
from outcore.graph.random_calls import random_calls
from outcore.machine.units import format_bytes
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.simulator.part_time import PartSend, SplitStageCosts
from outcore.spatial.parts import PartGrid
from outcore.spatial.plan import GridSearch
from outcore.spatial.tiles.tile_forecast import TileForecast
from outcore.spatial.tiles.tiled_stage import TiledStage, tiled_stage
from outcore.spatial.timeline import grid_timeline

__all__ = ["TiledSearch"]

_SMALLEST = 32
"""Pixels of a tile along its longest side."""
_TRIED = 5
"""Sizes of tiles whose bytes are found."""


class TiledSearch:
    """Plans of one network on one machine whose ranks stream.

    Args:
        search: the network, the costs of its calls and the links.
        devices: all of them are used.
        limit: what no rank may hold.
        replicas: the numbers of replicas that are allowed.
        shared: False if every replica is given a batch of the recorded size.
    """

    def __init__(
        self, search: GridSearch, devices: int, limit: int, *, replicas: Sequence[int], shared: bool = True
    ) -> None:
        self.search, self.devices, self.limit, self.replicas = search, devices, limit, replicas
        self.shared = shared
        self.least_bytes = 0
        """Of those that do not fit, what the smallest takes."""

    def plans(self, within_s: float) -> Iterator[Plan]:
        """For every number of replicas the plan that fits, where its step may be faster than so many seconds."""
        if not self.search.network.inputs:
            return  # there is no image
        for replicas in self.replicas:
            grids = list(self.search.grids(self.devices // replicas)) if self.devices % replicas == 0 else []
            if not grids:
                continue
            counts = min(grids, key=lambda counts: max(self._part(counts)))
            if self._least_s(counts, replicas) < within_s and (made := self._fitted(counts, replicas)) is not None:
                yield made

    @cached_property
    def _whole(self) -> TiledStage | None:
        """The network as far as tiles reach, in one tile; none if nothing can be streamed."""
        try:
            return self._stage(self._pixels)
        except OutcoreError:
            return None

    @cached_property
    def _pixels(self) -> tuple[int, ...]:
        network = self.search.network
        axes = network.axes[network.inputs[0]]
        shape = network.shapes[network.inputs[0]]
        return tuple(shape[axes.index(axis)] for axis in range(network.rank))

    @property
    def _in_parts(self) -> bool:
        """Whether each rank takes the loss of its part: where it is over pixels of the one map that tiles make."""
        whole = self._whole
        return self.search.over_pixels and whole is not None and whole.is_one_map

    def _stage(self, tile: tuple[int, ...], *, in_parts: bool = False) -> TiledStage:
        graph = self.search.graph
        return tiled_stage(self.search.network, graph.calls.keys(), tile, random=random_calls(graph), in_parts=in_parts)

    def _least_s(self, counts: tuple[int, ...], replicas: int) -> float:
        """What a step takes at least: its arithmetic, without halos, messages and the update."""
        if (whole := self._whole) is None:
            return float("inf")
        rows = self.search.weights.calls
        once = self._in_parts and len(whole.prepared.streaming.stages) == 1
        tiles_s = sum((1 if once else 2) * rows[c].forward_s + rows[c].backward_s for c in rows if c not in whole.rest)
        rest_s = sum(rows[c].time_s for c in whole.rest)
        return (tiles_s / math.prod(counts) + rest_s) * self._fraction(replicas)

    def _fraction(self, replicas: int) -> float:
        """The part of the recorded batch that a replica takes."""
        return 1 / replicas if self.shared else 1.0

    def _part(self, counts: tuple[int, ...]) -> list[int]:
        """Pixels of a rank's part along each axis."""
        return [math.ceil(n / c) for n, c in zip(self._pixels, counts, strict=True)]

    def _fitted(self, counts: tuple[int, ...], replicas: int) -> Plan | None:
        """The plan with the largest tiles that fit, of those that were tried."""
        sizes = list(self._sizes(counts))
        found: dict[tuple[int, ...], tuple[int, TileForecast]] = {}
        tile = sizes[len(sizes) // 2]
        try:
            while tile not in found and len(found) < _TRIED:
                forecast = self._forecast(counts, tile)
                peak = _peak_bytes(self._plan(counts, replicas, tile, forecast, closely=False))
                found[tile] = peak, forecast
                varies = forecast.bytes.tile_backward * self._fraction(replicas) / math.prod(tile)
                rough = {size: peak + varies * (math.prod(size) - math.prod(tile)) for size in sizes}
                known = rough | {size: exact for size, (exact, _) in found.items()}
                tile = next((size for size in sizes if known[size] <= self.limit), sizes[-1])
            fitting = [size for size, (peak, _) in found.items() if peak <= self.limit]
            if fitting:
                tile = max(fitting, key=math.prod)
                return self._plan(counts, replicas, tile, found[tile][1])
        except OutcoreError:
            return None
        least = min(peak for peak, _ in found.values())
        self.least_bytes = min(self.least_bytes or least, least)
        return None

    def _sizes(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Sides of tiles, the largest first: nearly square, a whole number of them in a part along each axis."""
        part = self._part(counts)
        longest, number, before = max(part), 1, None
        while number == 1 or math.ceil(longest / number) >= _SMALLEST:
            side = math.ceil(longest / number)
            tile = tuple(math.ceil(n / max(1, round(n / side))) for n in part)
            if tile != before:
                yield tile
            before, number = tile, max(number + 1, round(number * 1.2))

    def _forecast(self, counts: tuple[int, ...], tile: tuple[int, ...]) -> TileForecast:
        in_parts = self._in_parts
        stage = self._stage(tile, in_parts=in_parts)
        return TileForecast(stage, PartGrid(counts), self.search.weights, in_parts=in_parts)

    def _plan(
        self,
        counts: tuple[int, ...],
        replicas: int,
        tile: tuple[int, ...],
        forecast: TileForecast,
        *,
        closely: bool = True,
    ) -> Plan:
        """A plan with its figures; unless looked at closely, the peak alone."""
        search = self.search
        spatial: dict[str, object] = {"grid": list(counts), "tile": list(tile)}
        if forecast.in_parts:
            spatial["loss"] = "parts"
        made = Plan(
            search.graph.fingerprint,
            (("",),),
            "gpipe",
            replicas=replicas,
            exactness="reassociated",
            spatial=spatial,
        )
        fraction = self._fraction(replicas)
        costs = forecast.costs(fraction) if closely else forecast.most(fraction)
        timeline = grid_timeline(made, search.graph, search.weights, search.links, costs)
        peaks = timeline.peak_bytes[: made.ranks_per_replica]
        why = (_said(forecast, tile, costs), *_stopped(forecast)) if closely else ()
        predicted = PredictedStep(timeline.step_s, peaks, timeline.bubble, "simulated")
        return replace(made, predicted=predicted, why=why)


def _said(forecast: TileForecast, tile: tuple[int, ...], costs: SplitStageCosts) -> str:
    """What a rank does, in a sentence."""
    sent = [0] * costs.parts
    for action in (*costs.forward, *costs.backward):
        if isinstance(action, PartSend):
            for source, _, nbytes in action.messages:
                sent[source] += nbytes
    passes, sides = len(forecast.stages), " x ".join(map(str, tile))
    several = f" in {passes} passes" if passes > 1 else ""
    return f"every rank streams {max(forecast.tiles)} tiles of {sides} px{several}, and sends {format_bytes(max(sent))}"


def _stopped(forecast: TileForecast) -> list[str]:
    return [f"{block} runs untiled ({reason})" for block, reason in forecast.prepared.streaming.stopped[:3]]


def _peak_bytes(made: Plan) -> int:
    if made.predicted is None:
        raise PlanError("a plan without figures has no peak")
    return max(made.predicted.peak_bytes)
