"""The timeline that is expected of a plan, with or without a grid.

The plan is lowered as one without a grid is, then its first rank becomes as many as share the image, and the first
stage's time and memory are those of the script of its parts.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import PlanError
from outcore.graph import Graph
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
from outcore.spatial.script import part_scripts
from outcore.spatial.stage_layout import layout_of_stage

__all__ = ["predict_timeline", "split_costs"]


def predict_timeline(
    plan: Plan, graph: Graph, weights: CallWeights, links: Links, parts: PartCosts | None = None
) -> Timeline:
    """The predicted timeline of a step of the plan; `parts` is what was measured of a rank's part, if it was."""
    if plan.spatial is None:
        return predict_stages(plan, graph, weights, links)
    if "tile" in plan.spatial:
        raise PlanError("the timeline of a grid whose ranks stream tiles is not simulated; leave out the tile")
    calls = frozenset(plan.calls(graph)[0])
    fraction = 1 / (plan.replicas * plan.micro_batches * plan.batches)
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


def grid_timeline(plan: Plan, graph: Graph, weights: CallWeights, links: Links, costs: SplitStageCosts) -> Timeline:
    """The timeline of a plan with a grid, of whose first stage the costs of a micro-batch are known."""
    program, stages = lower(plan, graph, weights)
    program = split_first_stage(program, plan.parts, plan.replicas)
    return replace(simulate(program, stages, links, split=costs), name=plan.arrangement)
