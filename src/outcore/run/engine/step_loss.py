"""The loss of a step, the same on every rank: that of each micro-batch by its share of the samples, in their order."""

from __future__ import annotations

from typing import Any

import torch

from outcore.run.engine.step_programs import TaggedProgram
from outcore.run.engine.worker import ProgramRun, Worker
from outcore.run.ranks.world import World


def run_for_loss(world: World, worker: Worker, run: ProgramRun, script: TaggedProgram, *, update: bool) -> float:
    """Execute this rank's part of a program and add the losses up over all ranks.

    Args:
        world: all ranks.
        worker: of this rank.
        run: the micro-batches, their shares and what becomes of them.
        script: the program.
        update: whether gradients are reduced and the optimizer steps at the end.
    """
    losses = torch.zeros(len(run.weights), dtype=torch.float64, device="cpu")
    exchange: list[Any] = []

    def tell() -> None:
        for micro_batch, loss in run.losses.items():
            losses[run.pieces[micro_batch].number] = loss.item()
        exchange.append(world.start_sum(losses))

    # On the host losses travel while backwards run; on a GPU, reading them earlier would stop the kernels.
    run.after_forwards = tell if worker.forms.device.type == "cpu" else None
    try:
        worker.run(script.program.ranks[world.rank], script.tags, run, update=update)
        if not exchange:
            tell()
        exchange.pop()()
    finally:
        run.after_forwards = None  # it knows the run: without this, both would live until garbage is collected
        exchange.clear()
    every: list[float] = losses.tolist()
    return sum(weight * loss for weight, loss in zip(run.weights, every, strict=True))
