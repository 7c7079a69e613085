"""What of a stage the ranks of a grid can stream in tiles: the same answer for a plan and for its run.

The network is put into passes as far as tiles reach, norms over the image included. What follows runs untiled on the
first rank. A stage cannot be streamed where tiles would reach beyond it, or where what they compute draws random
numbers, which every rank would draw for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outcore.errors import PlanError
from outcore.graph.record.recording import Ref
from outcore.spatial.extent import is_image
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.prepared import PreparedStream, divided

__all__ = ["TiledStage", "tiled_stage"]


@dataclass(frozen=True)
class TiledStage:
    """A stage in tiles, and what of it runs untiled."""

    prepared: PreparedStream
    rest: frozenset[str]
    """The calls that follow the boundary."""

    @property
    def is_one_map(self) -> bool:
        """Whether the network returns one image and nothing else, and tiles make all of it."""
        network = self.prepared.network
        alone = self.prepared.is_map and isinstance(network.graph.recording.result, Ref)
        return alone and is_image(network, network.graph.outputs[0])


def tiled_stage(
    network: RegionNetwork,
    calls: Collection[str],
    tile: int | Sequence[int],
    *,
    random: Collection[str],
    in_parts: bool,
) -> TiledStage:
    """A stage in tiles.

    Args:
        network: all of the network, whose parameters and buffers are those that tiles use.
        calls: of the stage.
        tile: pixels of the image per tile.
        random: the calls that may draw random numbers.
        in_parts: whether each rank takes the loss of its part.

    Raises:
        PlanError: it cannot be streamed; says why.
        StreamError: nothing of the network can.
    """
    prepared = divided(network, tile=tile, statistics=True)
    streamed = prepared.streaming.calls
    if beyond := sorted(streamed - set(calls)):
        raise PlanError(f"tiles reach {beyond[0]}, which is in a later stage; put all of the network into one stage")
    if drawn := sorted(streamed & set(random)):
        raise PlanError(f"{drawn[0]} draws random numbers in what ranks would stream in tiles; leave out spatial.tile")
    stage = TiledStage(prepared, frozenset(calls) - streamed)
    if in_parts and not stage.is_one_map:
        raise PlanError(
            f"{network.graph.root.type} does not return one map that tiles make, so its loss cannot be taken in "
            "parts; leave out spatial.loss"
        )
    return stage
