"""What a step of a candidate takes: the event simulator's word, on the program that would run.

Closed forms rank hundreds of candidates; the few best are compiled and simulated, and what stands in the plan as
predicted is what the simulator said. A candidate that is never sent anywhere (one stage, one replica) needs no
simulation.
"""

from __future__ import annotations

from outcore.machine.link import Link
from outcore.plan_document import Predicted
from outcore.planner.pipeline import Pipeline, Route
from outcore.program import Links, Stages, compile_program, simulate

__all__ = ["SCHEDULE_NAMES", "judge"]

SCHEDULE_NAMES = {"model_parallel": "model-parallel", "gpipe": "gpipe", "1f1b": "1f1b", "gems": "gems-master"}
_LARGEST = 20_000
"""Computes in a program beyond which a replica stands for all of them."""


def judge(stages: Stages, pipeline: Pipeline, replicas: int, route: Route) -> Predicted:
    """Time, peak per rank of a replica, and bubble."""
    count = len(stages)
    simulated = replicas if count * replicas * pipeline.pieces <= _LARGEST else min(replicas, 2)
    program = compile_program(
        stages,
        SCHEDULE_NAMES[pipeline.schedule],
        micro_batches=pipeline.micro_batches,
        batches=pipeline.batches,
        replicas=simulated,
    )
    link = Link.symmetric(bandwidth_bytes_per_s=route.bytes_per_s, latency_s=route.latency_s)
    timeline = simulate(program, stages, Links(link))
    peaks = timeline.peak_bytes
    by_rank = tuple(max(peaks[rank::count]) for rank in range(count))
    return Predicted(timeline.step_s, by_rank, timeline.bubble, "simulated")
