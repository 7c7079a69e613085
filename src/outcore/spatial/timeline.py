"""The timeline that is expected of a plan, with or without a grid.

The plan is lowered as one without a grid is, then its first rank becomes as many as share the image, and the first
stage's time and memory are those of the script of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outcore.graph import Graph
from outcore.graph.random_calls import random_calls
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.lower import lower
from outcore.planner.pipeline.lower import predict_timeline as predict_stages
from outcore.program import Links, Timeline, simulate
from outcore.program.compile import split_first_stage
from outcore.program.plan.document import Plan
from outcore.program.simulator.part_time import SplitStageCosts
from outcore.spatial.forecast import bytes_of_ranks
from outcore.spatial.layout import SplitLayout
from outcore.spatial.part_costs import PartCosts
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.script import part_scripts
from outcore.spatial.stage_layout import cuts_of, layout_of_stage
from outcore.spatial.tiles.tile_forecast import TileForecast
from outcore.spatial.tiles.tiled_stage import tiled_stage
from outcore.stream.network import RegionNetwork

__all__ = ["predict_timeline", "split_costs"]


def predict_timeline(
    plan: Plan, graph: Graph, weights: CallWeights, links: Links, parts: PartCosts | None = None
) -> Timeline:
    """The predicted timeline of a step of the plan; `parts` is what was measured of a rank's part, if it was."""
    if plan.spatial is None:
        return predict_stages(plan, graph, weights, links)
    calls = frozenset(plan.calls(graph)[0])
    fraction = 1 / (plan.replicas * plan.micro_batches * plan.batches)
    if "tile" in plan.spatial:
        costs = tiled_costs(plan.spatial, graph, weights, calls, fraction)
        return grid_timeline(plan, graph, weights, links, costs)
    costs = split_costs(layout_of_stage(graph, calls, plan.spatial), weights, calls, fraction, parts)
    return grid_timeline(plan, graph, weights, links, costs)


def split_costs(
    layout: SplitLayout,
    weights: CallWeights,
    calls: frozenset[str],
    fraction: float,
    parts: PartCosts | None = None,
) -> SplitStageCosts:
    """A first stage of these calls on a grid, for a part of the batch that the network was recorded with."""
    memory = tuple(part.scaled(fraction) for part in bytes_of_ranks(layout, calls))
    return SplitStageCosts(*part_scripts(layout, weights, calls, fraction, parts), memory)


def tiled_costs(
    spatial: Mapping[str, Any], graph: Graph, weights: CallWeights, calls: frozenset[str], fraction: float
) -> SplitStageCosts:
    """The same where every rank streams its part in tiles."""
    network, in_parts = RegionNetwork(graph), spatial.get("loss") == "parts"
    stage = tiled_stage(network, calls, spatial["tile"], random=random_calls(graph), in_parts=in_parts)
    grid = PartGrid(shape_of(tuple(spatial["grid"]), network.rank), cuts_of(spatial))
    return TileForecast(stage, grid, weights, in_parts=in_parts).costs(fraction)


def grid_timeline(plan: Plan, graph: Graph, weights: CallWeights, links: Links, costs: SplitStageCosts) -> Timeline:
    """The timeline of a plan with a grid, of whose first stage the costs of a micro-batch are known."""
    program, stages = lower(plan, graph, weights)
    program = split_first_stage(program, plan.parts, plan.replicas)
    return replace(simulate(program, stages, links, split=costs), name=plan.arrangement)
