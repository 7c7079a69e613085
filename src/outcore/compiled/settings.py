"""What was asked for when a model is compiled within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outcore.compiled.head_apart import HeadApart
from outcore.cost.optimizer_cost import OptimizerCost

__all__ = ["CompileSettings"]


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
