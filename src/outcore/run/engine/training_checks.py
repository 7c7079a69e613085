"""What must hold for a step to change the model, checked where it costs nothing.

An optimizer over other parameters than the model's, and a loss that does not depend on them, train nothing and raise
nothing: such a run ends "finished". Both are refused with the first step at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from outcore.errors import OutcoreError

__all__ = ["check_gradients", "check_loss", "check_optimizer"]

_DETACHED = "was it computed under no_grad, or from .detach(), .item() or .data?"


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], error: type[OutcoreError]
) -> None:
    """Refuse an optimizer that holds none of the model's parameters."""
    model = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if model and not any(id(p) in model for p in held):
        raise error(
            f"the optimizer holds {len(held)} parameters and none of the {len(model)} of the model, so it would train "
            "nothing; make it from the parameters it is given: optimizer(params)"
        )


def check_loss(loss: Any, error: type[OutcoreError]) -> None:
    """Refuse a loss that cannot be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise error(f"loss(output, target) returned {type(loss).__name__}; it must return a tensor with one number")
    if loss.numel() != 1:
        raise error(
            f"loss(output, target) returned a tensor of shape {list(loss.shape)}; it must be one number: .mean() it"
        )
    if not loss.requires_grad:
        raise error(f"the loss does not depend on any parameter of the model, so nothing can be learned; {_DETACHED}")


def check_gradients(found: float, error: type[OutcoreError]) -> None:
    """Refuse to go on when no parameter of the model, on any rank, got a gradient."""
    if not found:
        raise error(f"the loss gave no parameter of the model a gradient, so nothing can be learned; {_DETACHED}")
