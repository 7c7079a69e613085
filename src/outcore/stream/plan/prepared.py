"""A network prepared to be streamed at one size: stages, tiles, and what runs untiled afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from outcore.errors import StreamError
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step, schedule_drops
from outcore.graph.structure import leaves
from outcore.program.script import Script
from outcore.stream.execute.fold_batch_norm import finish, fold
from outcore.stream.execute.tile_classes import TileClasses
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePasses, divide
from outcore.stream.plan.tiles import Grid, grid


@dataclass(frozen=True)
class StreamMode:
    """How a prepared network is run."""

    training: bool = True
    dense: bool = False
    """Whether the output leaves tile by tile: a loss over pixels, or a map that nobody holds."""
    ahead: int = 0
    """Threads that read pixels ahead."""


@dataclass(frozen=True)
class PreparedStream:
    """A model prepared to be streamed at one size."""

    graph: Graph
    network: RegionNetwork
    streaming: TilePasses
    grids: tuple[Grid, ...]
    tail: tuple[Step, ...]
    """What runs untiled."""
    on_host: bool = False
    """Whether maps between passes are in host memory."""
    scripts: dict[StreamMode, tuple[Script, Script]] = field(default_factory=dict, compare=False, repr=False)
    """Its forward and backward, as they are run; those that were planned, or written when they are first needed."""

    @cached_property
    def kinds(self) -> tuple[TileClasses, ...]:
        """The tiles of every pass, planned when they are first asked for."""
        return tuple(TileClasses(self.network, s, g) for s, g in zip(self.streaming.stages, self.grids, strict=True))

    @property
    def tiles(self) -> int:
        """Tiles in all forward passes."""
        return sum(len(g) for g in self.grids)

    @property
    def is_map(self) -> bool:
        """Whether everything is streamed, to one output, which is a map."""
        last, names = self.streaming.stages[-1], self.streaming.boundary
        return not self.tail and names == self.graph.outputs == last.maps and not last.reductions


def bound(graph: Graph, *, folded: bool) -> RegionNetwork:
    """The nodes of a graph, frozen batch norms folded if wanted."""
    network = RegionNetwork(graph, layouts=True)
    if folded:
        fold(network)
        finish(network)
    return network


def cut_up(network: RegionNetwork, streaming: TilePasses, tile: int | Sequence[int]) -> tuple[Grid, ...]:
    """The tiles of every pass."""
    rank = network.rank
    pixels = (tile,) * rank if isinstance(tile, int) else tuple(tile)
    if len(pixels) != rank or min(pixels) < 1:
        raise StreamError(f"tile={tile} must be one number above zero, or {rank} of them (one per dimension of pixels)")
    return tuple(grid(network, stage, pixels) for stage in streaming.stages)


def divided(
    network: RegionNetwork,
    *,
    tile: int | Sequence[int],
    boundary: Iterable[str] | None = None,
    statistics: bool = False,
    keep: Collection[str] = (),
    on_host: bool = False,
) -> PreparedStream:
    """Put a network into stages and tiles."""
    streaming = divide(network, boundary=boundary, statistics=statistics, keep=keep)
    grids = cut_up(network, streaming, tile)
    tail = [replace(s) for s in network.recording.steps if s.name not in streaming.calls]
    schedule_drops(tail, [r.name for _, r in leaves(network.recording.result, Ref)])
    return PreparedStream(network.graph, network, streaming, grids, tuple(tail), on_host)
