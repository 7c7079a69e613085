"""What the parts of a streamed step take: seconds and bytes of every kind of tile, and of the untiled tail.

Tiles of equal sizes take the same, so one of each is looked at. Times are those of `TileTimes`; with maps in host
memory a tile's copies to and from them are part of it, because they wait in the same queue. Bytes of the largest tile
are those that were found by running it on fake tensors, and the others' in proportion to their elements, which was seen
to be right to about one in a hundred. Without gradients, the values that are alive at once are added up, times what the
largest tile was found to take over that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outcore.ops.region import Region, elements
from outcore.program import Links
from outcore.program.script import Action, Decode, Encode, Recompute, Run, Script
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.prepared import PreparedStream
from outcore.stream.plan.tile_memory import StreamBytes, held_elements, tile_bytes
from outcore.stream.plan.tiles import TilePlan, plan_tile
from outcore.stream.plan.time_model import TileTimes

HOST_BYTES_PER_S = 1e10
"""Of copies between a device and maps in host memory."""


@dataclass(frozen=True)
class TileCost:
    """What one tile takes; bytes beside the maps."""

    kind: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class StepFigures:
    """What one way to stream a network takes, part by part."""

    prepared: PreparedStream
    times: TileTimes
    bytes: StreamBytes
    tail: UntiledTail | None = None
    """The untiled tail, where it runs under policies."""

    @property
    def beside_bytes(self) -> int:
        """What is held in every phase of a step, beside parameters, gradients and maps."""
        return self.bytes.small + self.bytes.workspace

    @property
    def links(self) -> Links | None:
        """The link below the device, which the tail's policies use."""
        return self.tail.links if self.tail is not None else None

    def tiles(self, index: int) -> Mapping[Hashable, TileCost]:
        """The tiles of a pass, by their sizes."""
        stage, numbers = self.prepared.streaming.stages[index], self._sizes[index]
        return {size: self._cost(stage, kind, plan) for kind, (size, plan) in enumerate(numbers.items())}

    def tail_scripts(self) -> tuple[Script, Script]:
        """What follows the boundary: one run each way, or as its policies say."""
        forward_s, backward_s = self.times.tail_each_way_s(self.prepared.streaming)
        managed = self.tail.scripts if self.tail is not None else None
        if self.tail is None or managed is None:
            held = self.beside_bytes + self.bytes.tail
            return (Run((), forward_s, 0, held),), (Run((), backward_s, 0, held),)
        scale = (forward_s + backward_s) / self.tail.plain_s if self.tail.plain_s else 1.0
        more = self.beside_bytes - self.tail.start_bytes
        forward, backward = (tuple(_moved(action, scale, more) for action in script) for script in managed)
        return forward, backward

    @cached_property
    def _sizes(self) -> tuple[dict[Hashable, TilePlan], ...]:
        """By pass, a tile of each size."""
        network, found = self.prepared.network, []
        for stage, kinds in zip(self.prepared.streaming.stages, self.prepared.kinds, strict=True):
            sizes: dict[Hashable, TilePlan] = {}
            for number in kinds.numbers:
                if (size := kinds.size(number)) not in sizes:
                    plan = plan_tile(network, stage, kinds.cut, number)
                    assert plan is not None
                    sizes[size] = plan
            found.append(sizes)
        return tuple(found)

    @cached_property
    def _largest(self) -> tuple[TilePass, TilePlan]:
        """The tile that holds the most elements, and its pass."""
        stages = self.prepared.streaming.stages
        every = ((stage, plan) for stage, sizes in zip(stages, self._sizes, strict=True) for plan in sizes.values())
        return max(every, key=lambda found: held_elements(*found))

    @cached_property
    def _without_gradients(self) -> float:
        """Bytes of a tile that runs without gradients, over those of its values that are there at once."""
        stage, plan = self._largest
        counted = tile_bytes(self.prepared.network, stage, plan, training=False).forward
        return counted / max(1, alive(self.prepared.network, stage, plan))

    def _cost(self, stage: TilePass, kind: int, plan: TilePlan) -> TileCost:
        network, held = self.prepared.network, self.bytes
        forward_s, backward_s = self.times.tile_s(stage, plan)
        if self.prepared.on_host:
            kept = set(self.prepared.streaming.kept)
            read = sum(_size(network, v, plan.regions[v]) for v in stage.sources if v in kept and v in plan.regions)
            written = sum(_size(network, v, r) for v, r in plan.targets.items() if v in kept)
            forward_s += (read + written) / HOST_BYTES_PER_S
            backward_s += (read + written) / HOST_BYTES_PER_S  # their gradients
        share = held_elements(stage, plan) / held_elements(*self._largest)
        backward = int(held.tile_backward * share)
        if held.training:
            forward = min(int(self._without_gradients * alive(network, stage, plan)), backward)
        else:
            forward = int(held.tile_forward * share)
        gradients_of_maps = held.output + held.kept
        return TileCost(
            kind,
            forward_s,
            backward_s,
            self.beside_bytes + forward,
            self.beside_bytes + gradients_of_maps + backward,
        )


def alive(network: RegionNetwork, stage: TilePass, plan: TilePlan) -> int:
    """The most bytes of a tile's values that are there at once, without gradients."""
    names = [v for v in (*stage.sources, *stage.smalls) if v in plan.regions]
    held = {v: _size(network, v, plan.regions[v]) for v in names}
    nodes = [n for n in stage.nodes if n.output in plan.needs]
    last = {v: node.output for node in nodes for v in node.values}
    wanted = {stage.targets[t] for t in plan.targets}
    most = sum(held.values())
    for node in nodes:
        held[node.output] = _size(network, node.output, plan.regions[node.output])
        most = max(most, sum(held.values()))
        for value in node.values:
            if last[value] == node.output and value not in wanted:
                held.pop(value, None)
    return most


def _size(network: RegionNetwork, value: str, region: Region) -> int:
    return elements(region) * network.dtypes[value].itemsize


def _moved(action: Action, scale: float, more: int) -> Action:
    """An action of the tail's own script, in the time of these costs and beside what a streamed step holds."""
    if isinstance(action, Run):
        return replace(action, time_s=action.time_s * scale, bytes=max(0, action.bytes + more))
    if isinstance(action, Recompute | Encode | Decode):
        return replace(action, time_s=action.time_s * scale)
    return action
