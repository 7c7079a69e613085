"""What was asked for when a model is compiled within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outcore.compiled.head_apart import HeadApart
from outcore.compiled.micro_batch.sample_wise import SampleWise
from outcore.cost.optimizer_cost import OptimizerCost

__all__ = ["CompileSettings", "Parts"]


@dataclass(frozen=True)
class Parts:
    """A batch in micro-batches."""

    size: int
    """Samples of one."""
    whole: SampleWise
    """The forward of all samples."""
    held_bytes: int
    """Beside a part: the results of all and their gradients, and the sum of the parameters' gradients."""
    fastest_bytes: int = 0
    """Of a step with the whole batch, as torch.compile chooses it by itself."""
    fastest_s: float = 0.0

    @property
    def number(self) -> int:
        """How many there are."""
        return self.whole.batch // self.size


@dataclass(frozen=True)
class CompileSettings:
    """A budget, and how steps are compiled within it."""

    budget_bytes: int | None
    optimizer: OptimizerCost
    loss: Callable[[Any], torch.Tensor] | None = None
    loss_bytes: int = 0
    plain_bytes: int = 0
    """What plain training takes, by prediction."""
    kernels: bool = True
    """Inductor's; else the graphs run operation by operation."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of Inductor."""
    head: HeadApart | None = None
    """The last layer, where it runs apart."""
    offload: bool = True
    """Whether values may leave the device for the backward."""
    graphs: bool = False
    """Whether both graphs are recorded as CUDA graphs; then no value leaves the device."""
    parts: Parts | None = None
    """Micro-batches, where a call runs in some."""
