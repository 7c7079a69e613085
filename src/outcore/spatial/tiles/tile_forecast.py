"""What ranks take that stream their parts of the image in tiles: a script of seconds and messages, and bytes.

The tiles, their seconds and their bytes are those that one device is planned with (`outcore.stream.plan`); the ranks
share them out as they do when they run (`outcore.spatial.tiles.tile_shares`), and what tiles add up is sent where
`outcore.spatial.tiles.run_tiles` sends it:

    forward    tiles of a pass ── sums of all ranks, maps to those who need them ── next pass ... ── the rest
    backward   the rest ── gradient of the boundary to every rank ── tiles again ── gradients of maps and sums ...

Where the loss is taken in parts, the tiles of the last pass are sent back at once, and all of it happens in forward.

A rank holds what one device holds: one tile, maps that later passes start from, and while tiles run the boundary as
well, of which ranks but the first let go before the rest runs. The first has on top what arrives of it from others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from outcore.cost.costs import Costs
from outcore.errors import PlanError
from outcore.ops.region import Region, elements
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.program.simulator.part_time import (
    PartBytes,
    PartCompute,
    PartScript,
    PartSend,
    PartWait,
    SplitStageCosts,
)
from outcore.spatial.parts import PartGrid
from outcore.spatial.script import POSTING_S, seconds_of_shares
from outcore.spatial.tiles.tile_shares import TileShares
from outcore.spatial.tiles.tiled_stage import TiledStage
from outcore.stream.plan.step_figures import StepFigures, TileCost
from outcore.stream.plan.tile_memory import predict_bytes
from outcore.stream.plan.time_model import TileTimes
from outcore.stream.rules.reduce import Largest, Mean, Moments, wide

__all__ = ["TileForecast"]

_Action: TypeAlias = PartCompute | PartSend | PartWait
_Message: TypeAlias = tuple[int, int, int]
_POSITION = 8
"""Bytes of a count, of a flag, or of a place along one dimension."""


class TileForecast:
    """What the ranks of a grid take that stream one network.

    Args:
        stage: the network in passes and tiles.
        grid: of the ranks.
        weights: of its calls on the whole image; of the last one with the loss.
        in_parts: whether each rank takes the loss of its part.
    """

    def __init__(self, stage: TiledStage, grid: PartGrid, weights: CallWeights, *, in_parts: bool) -> None:
        prepared = stage.prepared
        self.prepared, self.rest, self.weights, self.in_parts = prepared, stage.rest, weights, in_parts
        self.network, self.stages, self.count = prepared.network, prepared.streaming.stages, len(grid)
        self.shares = TileShares(prepared.network, prepared.streaming, prepared.kinds, grid)
        self._costs = _costs_of(weights)
        self._loss = self._beside_tiles()
        self._times = TileTimes(self.network, self._costs, training=True, dense=in_parts)
        self.bytes = predict_bytes(prepared, dense=in_parts)

    @cached_property
    def _tile_costs(self) -> tuple[Mapping[Hashable, TileCost], ...]:
        """By pass, what its tiles take, by their sizes."""
        figures = StepFigures(self.prepared, self._times, self.bytes)
        return tuple(figures.tiles(index) if stage.makes else {} for index, stage in enumerate(self.stages))

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of a forward by rank, over all passes."""
        return tuple(sum(map(len, passes)) for passes in self.shares.tiles)

    def costs(self, fraction: float = 1.0) -> SplitStageCosts:
        """Of a stage that is the whole network, for a part of the recorded batch."""
        forward, backward = (_with_messages_of(script, fraction) for script in self._scripts(fraction))
        ahead = (cost.forward_bytes for costs in self._tile_costs for cost in costs.values())
        tile = max(ahead, default=self._beside) - self._beside
        return SplitStageCosts(forward, backward, tuple(part.scaled(fraction) for part in self._memory(tile)))

    def most(self, fraction: float = 1.0) -> SplitStageCosts:
        """The same with some time in place of the true one and no messages, found without looking at every tile.

        A tile's forward is taken to hold what its backward does, which leaves the peak of a step as it is.
        """
        held = (part.scaled(fraction) for part in self._memory(self.bytes.tile_backward))
        some = (PartCompute((1.0,) * self.count),)
        return SplitStageCosts(some, some, tuple(held))

    # Seconds and messages

    def _scripts(self, fraction: float) -> tuple[PartScript, PartScript]:
        forward: list[_Action] = []
        last = len(self.stages) - 1
        for index in range(len(self.stages)):
            at_once = self.in_parts and index == last
            forward += self._pass(index, fraction, backward=at_once)
            forward += self._added_up(index) if at_once else self._finished(index)
        if self.in_parts:
            forward.append(PartCompute((fraction * sum(self._loss) / self.count,) * self.count))
            return (*forward, *self._again(range(last), fraction)), ()
        ways = zip((False, True), self._loss, strict=True)
        tail_s = [self._tail_s(fraction, backward=way) + fraction * loss for way, loss in ways]
        none = (0.0,) * (self.count - 1)
        forward.append(PartCompute((tail_s[0], *none)))
        again = self._again(range(last + 1), fraction)
        return tuple(forward), (PartCompute((tail_s[1], *none)), *self._shared_out(), *again)

    def _again(self, passes: range, fraction: float) -> list[_Action]:
        """The tiles of these passes in backward, the last first."""
        found: list[_Action] = []
        for index in reversed(passes):
            found += [*self._pass(index, fraction, backward=True), *self._added_up(index)]
        return found

    def _pass(self, index: int, fraction: float, *, backward: bool) -> list[_Action]:
        """Every rank's own tiles of a pass, forward or both ways."""
        kinds, costs = self.prepared.kinds[index], self._tile_costs[index]
        if not costs:
            return []
        seconds, issuing_s = [0.0] * self.count, (1 + backward) * self._times.issuing_s(self.stages[index])
        for rank, tiles in enumerate(self.shares.tiles):
            for tile in tiles[index]:
                cost = costs[kinds.size(kinds.numbers[tile])]
                both_s = cost.forward_s + cost.backward_s * backward
                seconds[rank] += issuing_s + fraction * (both_s - issuing_s)
        return [PartCompute(tuple(seconds))]

    def _finished(self, index: int) -> list[_Action]:
        """What tiles of a pass have added up, to every rank; maps, to those who need them."""
        found: list[_Action] = []
        for node in self.stages[index].reductions:
            found += self._everywhere(node.output, _rows(node.reduction))
        ranks = range(self.count)
        for name in self.stages[index].maps:
            made = [self._part_bytes(name, self.shares.made(index, name, rank)) for rank in ranks]
            found += _exchanged(name, [(a, b, made[a]) for a in ranks for b in self.shares.readers(name)])
        return found

    def _shared_out(self) -> list[_Action]:
        """The gradient of the boundary, from the first rank to every other."""
        names = self.prepared.streaming.boundary
        found = self._everywhere("gradients that there are", (_POSITION * len(names),))
        for name in names:
            if self.network.dtypes[name].is_floating_point:
                graded = [self._part_bytes(name, self.shares.graded(name, rank)) for rank in range(self.count)]
                found += _exchanged(f"{name} back", [(0, rank, graded[rank]) for rank in range(1, self.count)])
        return found

    def _added_up(self, index: int) -> list[_Action]:
        """The gradients of what a pass has read beside the image, from every rank to every other."""
        found: list[_Action] = []
        for name in self.shares.read(self.stages[index]):
            if self.network.dtypes[name].is_floating_point:
                found += self._everywhere(f"{name} back {index}", (self._bytes_of(name),))
        return found

    def _everywhere(self, name: str, rows: Iterable[int]) -> list[_Action]:
        """Rows of so many bytes, one after the other, from every rank to every other."""
        ranks, found = range(self.count), []
        for number, nbytes in enumerate(rows):
            found += _exchanged(f"{name} {number}", [(a, b, nbytes) for a in ranks for b in ranks])
        return found

    def _tail_s(self, fraction: float, *, backward: bool) -> float:
        """What follows the boundary, which runs on the first rank."""
        rows = (self.weights.calls[name] for name in self.rest)
        return sum(seconds_of_shares(row, [fraction], 1, backward=backward)[0] for row in rows)

    def _beside_tiles(self) -> tuple[float, float]:
        """What the loss takes of a network that is all in tiles, forward and backward: weights have it in the last
        call's, costs have not."""
        if self.rest:
            return 0.0, 0.0
        alone = CallWeights.of(self.prepared.graph, self._costs).calls
        forward_s, backward_s = (
            sum(max(0.0, _way_s(self.weights.calls[name], way) - _way_s(alone[name], way)) for name in alone)
            for way in (False, True)
        )
        return forward_s, backward_s

    # Bytes

    @property
    def _beside(self) -> int:
        return self.bytes.small + self.bytes.workspace

    def _memory(self, tile: int) -> tuple[PartBytes, ...]:
        """What every rank holds, where a tile's forward takes so much; parameters and the image are not counted."""
        held, beside = self.bytes, self._beside
        maps = held.kept + held.boundary
        # Gradients of maps that later passes read come from every rank before they are added up.
        arriving = held.kept * (self.count - 1)
        again = maps + held.output + held.kept + max(held.tile_backward, arriving) + held.gradients
        if self.in_parts:  # forward ends with all gradients, which backward multiplies by that of the loss
            return (PartBytes(held.gradients, beside + again, 2 * held.gradients),) * self.count
        later = held.kept + held.small
        first = PartBytes(
            later + held.boundary,
            beside + maps + max(tile, held.boundary, held.tail),
            beside + max(again, maps + max(held.tail + held.gradients, held.boundary + held.output)),
        )
        other = PartBytes(later, beside + maps + tile, beside + again - held.output)
        return first, *(other,) * (self.count - 1)

    def _bytes_of(self, name: str) -> int:
        return math.prod(self.network.shapes[name]) * self.network.dtypes[name].itemsize

    def _part_bytes(self, name: str, region: Region | None) -> int:
        return 0 if region is None else elements(region) * self.network.dtypes[name].itemsize


def _costs_of(weights: CallWeights) -> Costs:
    if weights.costs is None:
        raise PlanError("tiles on a grid are timed from the costs of calls; make the weights from costs")
    return weights.costs


def _way_s(weight: CallWeight, backward: bool) -> float:
    return weight.backward_s if backward else weight.forward_s


def _exchanged(name: str, messages: Collection[_Message]) -> list[_Action]:
    """Messages between different ranks, and the wait for them."""
    sent = tuple((a, b, nbytes) for a, b, nbytes in messages if a != b and nbytes)
    return [PartSend(name, sent, POSTING_S), PartWait(name)] if sent else []


def _rows(reduction: object) -> Sequence[int]:
    """Bytes of the rows that a rank sends every other of what its tiles have added up."""
    if isinstance(reduction, Moments):
        shape = 2 * (1 if reduction.over_batch else reduction.shape[0]) * reduction.groups
        return _POSITION, shape * wide(reduction.dtype).itemsize
    assert isinstance(reduction, Mean | Largest)
    kept = math.prod(n for d, n in enumerate(reduction.shape) if d not in reduction.dims)
    if isinstance(reduction, Mean):
        return (kept * wide(reduction.dtype).itemsize,)
    return kept * reduction.dtype.itemsize, kept * _POSITION, kept * _POSITION * len(reduction.shape)


def _with_messages_of(script: PartScript, fraction: float) -> PartScript:
    """The same with the messages of a part of the batch."""
    found: list[_Action] = []
    for action in script:
        if isinstance(action, PartSend):
            messages = tuple((a, b, max(1, round(n * fraction))) for a, b, n in action.messages)
            action = PartSend(action.value, messages, action.host_s)
        found.append(action)
    return tuple(found)
