"""The layout of a plan's first stage on its grid: the engine runs it, the simulator times it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.spatial.extent import is_one_map, split_extent
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.parts import PartGrid, shape_of
from outcore.stream.network import RegionNetwork

__all__ = ["cuts_of", "layout_of_stage"]


def cuts_of(spatial: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """Where a plan cuts the axes; nothing for equal parts."""
    return tuple(tuple(axis) for axis in spatial.get("cuts", ()))


def layout_of_stage(
    graph: Graph,
    calls: frozenset[str],
    spatial: Mapping[str, Any],
    network: RegionNetwork | None = None,
    *,
    whole: bool | None = None,
) -> SplitLayout:
    """The regions of all ranks for a stage of some calls; raises where nothing of it can be split.

    Args:
        graph: the network.
        calls: of the stage.
        spatial: the grid, as a plan says it.
        network: its regions, where they are known.
        whole: whether what the stage makes is gathered; unless the loss is taken in parts, if not given.
    """
    network = network if network is not None else RegionNetwork(graph)
    grid = PartGrid(shape_of(tuple(spatial["grid"]), network.rank), cuts_of(spatial))
    extent = split_extent(network, grid.counts, calls)
    if not extent.calls:
        where, why = next(iter(extent.stopped), ("the model", "no input is an image"))
        raise PlanError(
            f"nothing of {graph.root.type} can run on a grid of {grid} ranks: {where} comes first, and {why}; "
            "plan without a grid"
        )
    for field in ("twice", "early"):
        for name in spatial.get(field, ()):
            if name not in network.nodes:
                raise PlanError(f"spatial.{field} names {name}, which is no value of {graph.root.type}")
    in_parts = spatial.get("loss") == "parts"
    if in_parts and not is_one_map(network, extent):
        raise PlanError(
            f"{graph.root.type} does not return one map that is split to the end, so its loss cannot be taken in "
            "parts; leave out spatial.loss"
        )
    whole_on: Collection[int] = range(len(grid)) if calls - extent.calls else (0,)
    if in_parts and not whole:
        whole_on = ()
    twice, early = spatial.get("twice", ()), spatial.get("early", ())
    return lay_out(network, extent, grid, twice=twice, early=early, whole_on=whole_on)
