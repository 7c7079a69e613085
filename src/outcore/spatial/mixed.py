"""A grid in front of a pipeline: the large, early part of a network shared by ranks, the rest on a rank for each stage.

The network is cut into as many stages of equal time as there are devices, and the first p of them become one, on a grid
of p ranks: so every device has the same share of the work, and the image is whole where it has become small. Every p
whose part can be split, every arrangement of its grid and every number of micro-batches that divides the batch is
timed; the bytes of the best few are counted.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import OutcoreError, PlanError
from outcore.planner.partition.partition import split
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.simulator.part_time import PartBytes, SplitStageCosts
from outcore.spatial.extent import split_extent
from outcore.spatial.forecast import bytes_of_ranks
from outcore.spatial.layout import SplitLayout
from outcore.spatial.plan import GridSearch
from outcore.spatial.script import part_scripts
from outcore.spatial.stage_layout import layout_of_stage
from outcore.spatial.timeline import grid_timeline

__all__ = ["mixed_plans"]

_MOST_PIECES = 8
_COUNTED = 2
"""Plans whose bytes are counted."""
_MOST_DEVICES = 16
"""With more, stages are too many to be cut for every number of ranks in front."""


def mixed_plans(search: GridSearch, devices: int, samples: int, *, pieces: bool, within_s: float) -> list[Plan]:
    """Plans with a grid in front of stages, with their figures, the fastest first.

    Args:
        search: the network and the machine.
        devices: all of them are used.
        samples: of a batch.
        pieces: whether the batch may be cut into micro-batches.
        within_s: what a step may take to be worth the counting of its bytes.
    """
    if not 2 < devices <= _MOST_DEVICES:
        return []
    try:
        cut = split(search.graph, search.weights, stages=devices, balance="compute")
    except PlanError:
        return []
    calls = [stage.calls for stage in cut.stages.stages]
    found: list[tuple[float, Plan, SplitLayout]] = []
    for parts in range(2, devices):
        first = frozenset(call for stage in calls[:parts] for call in stage)
        for counts in search.grids(parts):
            if not first <= split_extent(search.network, counts).calls:
                continue
            spatial = {"grid": list(counts)}
            stages = name_stages(
                search.graph, [[c for c in search.graph.calls if c in first], *map(list, calls[parts:])]
            )
            try:
                layout = layout_of_stage(search.graph, first, spatial, search.network)
                for count in range(1, min(samples, _MOST_PIECES) + 1 if pieces else 2):
                    if samples % count == 0:
                        made = _plan(search, stages, spatial, count, _costs(search, layout, first, count))
                        assert made.predicted is not None
                        found.append((made.predicted.time_s, made, layout))
            except OutcoreError:
                continue
    found.sort(key=lambda row: row[0])
    finished = []
    for time_s, made, layout in found[:_COUNTED]:
        if time_s < within_s:
            first = frozenset(made.calls(search.graph)[0])
            memory = tuple(part.scaled(1 / made.micro_batches) for part in bytes_of_ranks(layout, first))
            costs = replace(_costs(search, layout, first, made.micro_batches), memory=memory)
            finished.append(_plan(search, made.stages, {"grid": list(made.grid)}, made.micro_batches, costs))
    return finished


def _costs(search: GridSearch, layout: SplitLayout, first: frozenset[str], pieces: int) -> SplitStageCosts:
    """Without bytes."""
    scripts = part_scripts(layout, search.weights, first, 1 / pieces, search.parts)
    return SplitStageCosts(*scripts, (PartBytes(),) * len(layout.grid))


def _plan(
    search: GridSearch,
    stages: tuple[tuple[str, ...], ...],
    spatial: dict[str, list[int]],
    micro_batches: int,
    costs: SplitStageCosts,
) -> Plan:
    made = Plan(
        search.graph.fingerprint, stages, micro_batches=micro_batches, exactness="reassociated", spatial=spatial
    )
    timeline = grid_timeline(made, search.graph, search.weights, search.links, costs)
    peaks = timeline.peak_bytes[: made.ranks_per_replica]
    return replace(made, predicted=PredictedStep(timeline.step_s, peaks, timeline.bubble, "simulated"))
