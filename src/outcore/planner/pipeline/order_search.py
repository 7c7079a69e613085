"""Orders of computing that no schedule has a name for, for the cuts that are best under the named ones.

The list scheduler (`outcore.program.list_scheduler`) makes orders from the times of the stages as they were cut: with
every rule of preference, several numbers of micro-batches under way, and both placements. Each is simulated as the
named schedules are, and the fastest within the cap is kept. A step of many computes is left to the named schedules,
which come close to filling it, and whose programs are judged by shorter ones.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.planner.pipeline.candidates import Candidate
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink
from outcore.program import Links, Stages, simulate
from outcore.program.list_scheduler import synthesised_orders
from outcore.program.plan.document import PredictedStep
from outcore.program.written_order import program_in_order, write_order

_LARGEST = 160
"""Forwards of a step, over all ranks, beyond which no orders are made."""


def best_order(
    stages: Stages, candidate: Candidate, cap: float | None, route: RankLink
) -> tuple[PredictedStep, Candidate] | None:
    """The fastest order for stages that were cut for a candidate, and what a step takes in it; None if none fits.

    Args:
        stages: of one micro-batch.
        candidate: how the devices are shared; the number of pieces stays as it is.
        cap: what no rank may exceed.
        route: between ranks.
    """
    pieces = candidate.pipeline.pieces
    if len(stages) < 2 or pieces < 2 or candidate.replicas * len(stages) * pieces > _LARGEST:
        return None
    links = Links(route.link)
    caps = None if cap is None else (int(cap),) * len(stages)
    best: tuple[PredictedStep, Candidate] | None = None
    for setting, orders in synthesised_orders(stages, pieces, caps, links):
        rows = write_order(orders)
        program = program_in_order(stages, rows, inverted=setting.inverted, replicas=candidate.replicas)
        timeline = simulate(program, stages, links)
        peaks = timeline.peak_bytes[: len(stages)]
        if (cap is not None and max(peaks) > cap) or (best is not None and timeline.step_s >= best[0].time_s):
            continue
        pipeline = Pipeline("gems", 1, pieces) if setting.inverted else Pipeline("gpipe", pieces, 1)
        predicted = PredictedStep(timeline.step_s, peaks, timeline.bubble, "simulated")
        best = predicted, replace(candidate, pipeline=pipeline, order=rows)
    return best
