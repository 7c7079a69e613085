"""Several stages on one rank: orders of computing for pipelines that are folded onto fewer ranks.

A named schedule knows one stage per rank. If stages share ranks, the pipeline is first simulated as if each had its
own; then the orders of the stages that share a rank are merged by the time at which each compute began. One clock
orders all ranks, so whatever a compute waits for stands before it everywhere, and there is no deadlock.

    stages on ranks 0 1 2 1 0, model parallel     rank 0  F0 F4 B4 B0
                                                  rank 1  F1 F3 B3 B1
                                                  rank 2  F2 B2
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.program.instructions import Backward, Compute, Forward
from outcore.program.stages import Stages

__all__ = ["merge_orders"]


def merge_orders(stages: Stages, orders: Sequence[Sequence[Compute]], placement: Sequence[int]) -> list[list[Compute]]:
    """The order of every rank, given the order of every stage and the rank it lies on."""
    from outcore.program.compile import assemble
    from outcore.program.simulator.simulate import simulate

    timeline = simulate(assemble(stages, orders, name="one stage to a rank"), stages)
    merged: list[list[Compute]] = [[] for _ in range(max(placement) + 1)]
    # Events stand in the order in which they began, also those of no length.
    for event in timeline.events:
        if event.kind in ("forward", "backward"):
            kind = Forward if event.kind == "forward" else Backward
            merged[placement[event.stage]].append(kind(event.stage, event.micro_batch, event.replica))
    return merged
