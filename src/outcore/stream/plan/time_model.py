"""How long a way to stream a network takes: costs per call times the share of it that tiles compute, halos included.

Regions are boxes whose sides depend on one axis each, so how many elements all tiles compute is a product of sums along
the axes: three tiles on the diagonal (the first, one between, the last) give it for any number of tiles.
"""

from __future__ import annotations

import math

from torch import nn

from outcore.cost.costs import Costs
from outcore.ops.region import elements
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.plan.passes import TilePass, TilePasses
from outcore.stream.plan.tiles import Grid, TilePlan, plan_tile

_CALL_S = 4e-5
"""The interpreter's time for one operation of one tile."""


class TileTimes:
    """Times of one network, streamed in any way.

    Args:
        network: to be streamed.
        costs: of its calls on the whole image; without them a plain ratio of FLOPs to bytes.
        training: whether there is a backward pass.
        dense: whether the last stage runs once, its output leaving tile by tile.
    """

    def __init__(self, network: RegionNetwork, costs: Costs | None, *, training: bool, dense: bool) -> None:
        self.network, self.costs, self.training, self.dense = network, costs, training, dense
        self._costs: dict[str, tuple[float, float]] = {}

    def streamed(self, streaming: TilePasses, grids: tuple[Grid, ...]) -> tuple[float, int]:
        """Seconds of all passes, and the elements of the largest tile."""
        total, largest = 0.0, 0
        for stage, cut in zip(streaming.stages, grids, strict=True):
            computing_s, issuing_s, most = self.streamed_stage(streaming, stage, cut)
            total += computing_s + issuing_s * len(cut)
            largest = max(largest, most)
        return total, largest

    def streamed_stage(self, streaming: TilePasses, stage: TilePass, cut: Grid) -> tuple[float, float, int]:
        """Seconds of a pass, those to launch one of its tiles, and the elements of the largest."""
        once = self.dense and stage is streaming.stages[-1]
        forwards = 1 if once or not self.training else 2
        computed, largest = self.computed(stage, cut)
        total = 0.0
        for node in stage.nodes:
            forward, backward = self._cost(node)
            share = computed.get(node.output, 0) / max(1, math.prod(node.shape))
            total += share * (forwards * forward + (backward if self.training else 0.0))
        return total, self.issuing_s(stage) * (forwards + self.training), largest

    def issuing_s(self, stage: TilePass) -> float:
        """Seconds to launch one tile one way, however large it is."""
        return _CALL_S * len(stage.nodes)

    def tile_s(self, stage: TilePass, tile: TilePlan) -> tuple[float, float]:
        """Seconds of one tile, forward and backward, launching included."""
        forward_s = backward_s = self.issuing_s(stage)
        for node in stage.nodes:
            if (region := tile.regions.get(node.output)) is not None:
                forward, backward = self._cost(node)
                share = elements(region) / max(1, math.prod(node.shape))
                forward_s, backward_s = forward_s + share * forward, backward_s + share * backward
        return forward_s, backward_s

    def computed(self, stage: TilePass, cut: Grid) -> tuple[dict[str, float], int]:
        """How many elements of each node all tiles compute, and how many the largest tile has."""
        along = [[(k, 1) for k in range(c)] if c <= 3 else [(0, 1), (c // 2, c - 2), (c - 1, 1)] for c in cut.counts]
        sums: dict[str, list[float]] = {}
        largest = 0
        for i in range(max(map(len, along), default=1)):
            plan = plan_tile(self.network, stage, cut, tuple(c[min(i, len(c) - 1)][0] for c in along))
            if plan is None:
                continue
            largest = max(largest, plan.elements())
            for node in stage.nodes:
                if (region := plan.regions.get(node.output)) is None:
                    continue
                axes = self.network.axes[node.output]
                found = sums.setdefault(node.output, [0.0] * len(region))
                for dim, ((lo, hi), axis) in enumerate(zip(region, axes, strict=True)):
                    if axis is None or axis >= len(along):
                        found[dim] = hi - lo
                    elif i < len(along[axis]):
                        found[dim] += along[axis][i][1] * (hi - lo)
        return {name: math.prod(found) for name, found in sums.items()}, largest

    def _cost(self, node: RegionNode) -> tuple[float, float]:
        if node.absorbed:  # a folded norm costs nothing of its own
            costs = [self._call_cost(c) for c in node.absorbed]
            return sum(f for f, _ in costs), sum(b for _, b in costs)
        return self._call_cost(node.call)

    def _call_cost(self, call: str) -> tuple[float, float]:
        if call not in self._costs:
            self._costs[call] = self._measured(call) if self.costs is not None else self._guessed(call)
        return self._costs[call]

    def _measured(self, call: str) -> tuple[float, float]:
        assert self.costs is not None
        cost = self.costs[call]
        return (
            cost.forward.median_s if cost.forward is not None else 0.0,
            cost.backward.median_s if cost.backward is not None else 0.0,
        )

    def _guessed(self, call: str) -> tuple[float, float]:
        """Seconds of forward and backward, guessed from the FLOPs and bytes of a call."""
        found, values = self.network.graph.calls[call], self.network.graph.values
        moved = sum(values[v].bytes for v in (*found.inputs, *found.outputs))
        weights = sum(math.prod(t.shape) for p in found.parameters if (t := _tensor(self.network.model, p)) is not None)
        pixels = sum(math.prod(values[v].shape[2:]) for v in found.outputs if len(values[v].shape) > 2)
        forward = moved / 1e12 + 2 * weights * pixels / 1e14
        return forward, 2 * forward

    def tail_s(self, streaming: TilePasses) -> float:
        """Seconds of the untiled tail."""
        return sum(self.tail_each_way_s(streaming))

    def tail_each_way_s(self, streaming: TilePasses) -> tuple[float, float]:
        """Seconds of the untiled tail, forward and backward."""
        costs = [self._call_cost(call) for call in self.network.graph.calls if call not in streaming.calls]
        return sum(f for f, _ in costs), sum(b for _, b in costs) if self.training else 0.0


def _tensor(model: nn.Module, name: str) -> nn.Parameter | None:
    holder, _, last = name.rpartition(".")
    return model.get_submodule(holder)._parameters.get(last)
