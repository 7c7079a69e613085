"""An optimizer that takes the memory of a step and changes nothing.

Before training, steps are tried to see what they reserve (`outcore.memory.saved_tensors.trial_steps`). Where state
lives below the device, that is most of what a step does: buckets of parameters, gradients and optimizer state come and
go. So a trial runs the same offloader as training, and only the innermost call, that of the user's optimizer, is
exchanged: in its place memory is taken as that optimizer was counted to take it (`outcore.cost.optimizer_cost`), state
that stays in the first step and a workspace in every step. No parameter is written, and no state of the optimizer is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.memory.param_offload.bucketed_step import PartialOptimizer


class TrialOptimizer(PartialOptimizer):
    """Takes memory for some of an optimizer's parameters, as a step of it would.

    Args:
        optimizer: the user's.
        step: its own step, which is not called.
        cost: what it takes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], cost: OptimizerCost) -> None:
        super().__init__(optimizer, step)
        self.cost = cost
        self.made: dict[int, list[torch.Tensor]] = {}
        """Parameter (id) -> memory where its state will be, where there is none yet."""

    def _narrowed(self, parts: Sequence[list[nn.Parameter]]) -> None:
        stepped = [p for params in parts for p in params if p.grad is not None]
        for p in stepped:
            if id(p) not in self.made and not self.optimizer.state.get(p):
                self.made[id(p)] = like(p, self.cost.state_per_parameter)
        take_workspace(stepped, self.cost)

    def tensors(self, parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """The state of parameters: what there is of it, and what was made here."""
        made = [t for p in parameters for t in self.made.get(id(p), ()) if t.numel() > 1]
        return super().tensors(parameters) + made


def take_workspace(parameters: Sequence[torch.Tensor], cost: OptimizerCost) -> None:
    """Take what an optimizer's step works in, for a moment."""
    moment = [t for p in parameters for t in like(p, cost.workspace_per_parameter)]
    if parameters and cost.workspace_per_largest:
        moment += like(max(parameters, key=lambda p: p.nbytes), cost.workspace_per_largest)
    del moment


def like(parameter: torch.Tensor, times: float) -> list[torch.Tensor]:
    """Memory of so many times the size of a parameter, whole tensors first."""
    whole, rest = int(times), round((times - int(times)) * parameter.numel())
    found = [torch.empty_like(parameter, requires_grad=False) for _ in range(whole)]
    return found + ([torch.empty(rest, dtype=parameter.dtype, device=parameter.device)] if rest else [])
