"""The loss of a step: the job's own, or the usual one for its targets; and what it holds beside the model's output.

A budget is for the whole step. Policies and tiles are planned for the model's own values, so the targets and what the
loss makes of the output are counted beside them: little for a class, several maps of scores for a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outcore.cost.predicted.loss_memory import apart, loss_bytes_of
from outcore.cost.training_network import default_loss
from outcore.graph.structure import leaves, substitute
from outcore.job import Job
from outcore.train.examples.feed import MicroBatch
from outcore.train.start import RunForecast

__all__ = ["StepLoss", "default_loss"]


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step as a function of the output alone, and what it holds beside it."""

    loss: Callable[[Any, Any], Tensor]
    targets: Any
    target_bytes: int = 0
    held_bytes: int = 0

    def __call__(self, output: Any) -> Tensor:
        return self.loss(output, self.targets)

    @property
    def bytes(self) -> int:
        """All that is alive for it beside the model's output."""
        return self.target_bytes + self.held_bytes

    @classmethod
    def of(cls, model: nn.Module, job: Job, first: MicroBatch, expected: RunForecast) -> StepLoss:
        """The job's loss with the targets of the first batch, on the model's device."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        targets = substitute(first.targets, Tensor, lambda t: t.to(device))
        made = cls(apart(job.loss or default_loss), targets)
        taken = sum(t.numel() * t.element_size() for _, t in leaves(targets, Tensor))
        held = 0 if expected.graph is None else loss_bytes_of(expected.graph, made, device)
        return replace(made, target_bytes=taken, held_bytes=held)
