"""How an engine trains: one frozen value, which the engine's keyword arguments make.

`EngineOptions` are the same fields as a dictionary of keyword arguments, so that a type checker knows them at the call;
a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from outcore.errors import EngineError
from outcore.job import Job
from outcore.loss_scale import LossScale
from outcore.program import Program
from outcore.run.engine.setup import Groups, MakeOptimizer
from outcore.run.stage.stage_module import Execute

Loss = Callable[[Any, Any], torch.Tensor]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `outcore.Engine`."""

    loss: Loss | None
    optimizer: MakeOptimizer | None
    scheduler: MakeScheduler | None
    groups: Groups | None
    example: Any
    program: Program | None
    reduction: Literal["mean", "sum"]
    clip_norm: float | None
    autocast: torch.dtype | None
    loss_scale: LossScale | None
    accumulate: int
    seed: int
    device: str | torch.device | None
    timeout_s: float
    grace_s: float
    offload_idle: bool
    execute: Execute | None
    weights: str | Path | None
    checkpoints: str | Path | None


@dataclass(frozen=True)
class EngineSettings:
    """How an engine trains.

    Args:
        loss: ``loss(output, target)``; the job's own if not given.
        optimizer: makes the optimizer from parameters (or groups of them); the job's own if not given. Without
            any, the engine computes gradients and leaves them in ``parameter.grad``.
        scheduler: makes a learning-rate scheduler from the optimizer; it advances with every update.
        groups: options of the optimizer by a parameter's name.
        example: inputs of one batch, needed if a module is given.
        program: an order to run in place of the plan's schedule, as `outcore.program.list_scheduler` finds them.
        reduction: whether the loss is a mean over samples or a sum.
        clip_norm: largest norm of the gradients of all stages together.
        autocast: dtype of mixed precision; with float16 one loss scale is kept for all ranks.
        loss_scale: starts the loss scale; with float16 one is made if none is given.
        accumulate: calls of `Engine.step` before an update.
        seed: of initial weights (of a job) and of random masks.
        device: "cpu" or "cuda"; this rank's GPU if there is one.
        timeout_s: after which a silent rank ends the run.
        grace_s: after which a rank that cannot end by itself is ended, once another has failed.
        offload_idle: under GEMS, whether parameters, gradients and optimizer state of the stage that a rank
            does not compute with wait outside its device.
        execute: runs a stage's part of the network; where policies for saved values act. Without it, the plan's
            policies do.
        weights: a checkpoint to begin with; a job's model is then never built with weights of its own, on any
            rank.
        checkpoints: where to save when SIGUSR1 or SIGTERM comes; the latter then ends the run.
    """

    loss: Loss | None = None
    optimizer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    groups: Groups | None = None
    example: Any = None
    program: Program | None = None
    reduction: Literal["mean", "sum"] = "mean"
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    loss_scale: LossScale | None = None
    accumulate: int = 1
    seed: int = 0
    device: str | torch.device | None = None
    timeout_s: float = 300.0
    grace_s: float = 10.0
    offload_idle: bool = False
    execute: Execute | None = None
    weights: str | Path | None = None
    checkpoints: str | Path | None = None

    def completed(self, source: Job | nn.Module) -> EngineSettings:
        """The settings with what a job says of loss and optimizer, and the loss scale that float16 needs.

        Raises:
            EngineError: there is no loss.
        """
        loss, optimizer = self.loss, self.optimizer
        if isinstance(source, Job):
            loss, optimizer = loss or source.loss, optimizer or source.optimizer
        if loss is None:
            raise EngineError("there is no loss to train for; pass loss=..., or a job with loss(output, target)")
        scale = LossScale() if self.autocast is torch.float16 and self.loss_scale is None else self.loss_scale
        return replace(self, loss=loss, optimizer=optimizer, loss_scale=scale)
