"""What of a budget is left for the values of a step.

Throughout a step there are the weights, the arguments and the optimizer's state. Two threads, of the forward and of the
backward, have a workspace of cuBLAS each, and a share of the budget is left free for what predictions miss. CUDA
graphs have copies of the arguments in their own memory, and gradients that a loop adds up are copies as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.compiled.trial_step import distinct_bytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph.structure import leaves
from outcore.machine.units import format_bytes, rounded_up

__all__ = ["Room", "library_bytes", "refusal", "room_of"]

_MARGIN = {"cuda": 0.02}
_WORKSPACE = {True: 32 * 2**20, False: 9 * 2**20}
"""What cuBLAS takes for a thread, on Hopper chips and before them."""


@dataclass(frozen=True)
class Room:
    """The memory of a step that is not its values, and what of a budget that leaves for them."""

    own_bytes: int
    """Throughout: weights, arguments, optimizer state."""
    update_bytes: int
    """The most that the optimizer's own step adds to it."""
    copied_bytes: int = 0
    """Arguments and gradients that CUDA graphs hold copies of."""
    workspace_bytes: int = 0
    """Workspaces of libraries."""
    margin: float = 0.0
    """Share of the budget that is left free for what predictions miss."""

    @property
    def fixed_bytes(self) -> int:
        """What a step takes beside its values, whatever is saved."""
        return self.workspace_bytes + self.copied_bytes

    def left(self, budget_bytes: int, corrected_bytes: int) -> int:
        """What is left for the values of a step.

        Args:
            budget_bytes: of the whole step.
            corrected_bytes: what steps were seen to take beyond the prediction.
        """
        margin = max(self.fixed_bytes, int(self.margin * budget_bytes))
        return budget_bytes - self.own_bytes - margin - corrected_bytes

    def least(self, peak_bytes: int, corrected_bytes: int) -> int:
        """The smallest budget in which the values of a step have room.

        Args:
            peak_bytes: of the values.
            corrected_bytes: as in `left`.
        """
        smallest = self.own_bytes + peak_bytes + corrected_bytes
        return max(smallest + self.fixed_bytes, int(smallest / (1 - self.margin)) + 1)


def library_bytes(device: torch.device) -> int:
    """What a thread's matrix products keep for themselves on a device."""
    if device.type != "cuda":
        return 0
    return _WORKSPACE[torch.cuda.get_device_capability(device) >= (9, 0)]


def room_of(
    model: nn.Module, args: Any, kwargs: Any, optimizer: OptimizerCost, device: torch.device, *, graphs: bool
) -> Room:
    """What is there beside the values of a model's step.

    Args:
        model: the user's.
        args: of a call.
        kwargs: of a call.
        optimizer: what its state takes.
        device: where the model is.
        graphs: whether steps are CUDA graphs.
    """
    sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    gradients = sum(sizes.values())
    weights = distinct_bytes([*model.parameters(), *model.buffers()])
    given = distinct_bytes([t for _, t in leaves((args, kwargs), torch.Tensor) if t.device.type == device.type])
    return Room(
        own_bytes=weights + given + optimizer.state_bytes(sizes),
        update_bytes=gradients + optimizer.workspace_bytes(sizes),
        copied_bytes=given + gradients if graphs else 0,
        workspace_bytes=2 * library_bytes(device),
        margin=_MARGIN.get(device.type, 0.0),
    )


def refusal(budget_bytes: int, least_bytes: int, what: str) -> PlanError:
    """The error that a budget is too small, with one that would do.

    Args:
        budget_bytes: what was given.
        least_bytes: what is needed.
        what: needs it.
    """
    refused = PlanError(
        f"a compiled training step cannot be done within {format_bytes(budget_bytes)}: {what} needs "
        f'{format_bytes(least_bytes)}; give memory="{rounded_up(least_bytes)}" or more, a smaller batch, or '
        "leave compile=True away"
    )
    refused.least_bytes = least_bytes
    return refused
