"""One member of an array: an ordinary model with an ordinary optimizer, which trains together with others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from outcore.fusion.array import FusedArray


def independent_copy(model: nn.Module) -> nn.Module:
    """A copy with memory of its own; a plain deepcopy of a member would copy the memory of all."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copied = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # one piece of memory, as in a model that was built
    return made


class Member:
    """A view of one slot of an array."""

    def __init__(self, array: FusedArray, slot: int) -> None:
        self.array, self.slot = array, slot

    @property
    def model(self) -> nn.Module:
        """The user's own module; its tensors are views of the stacks."""
        return self.array.models[self.slot]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The member's own optimizer (the first of several)."""
        return next(iter(self.array.slots[self.slot].optimizers.values()))

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By objective."""
        return self.array.slots[self.slot].optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The member's own schedulers."""
        return self.array.slots[self.slot].schedulers

    @property
    def status(self) -> str:
        """training, stopped or diverged."""
        return self.array.status[self.slot]

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return float("nan") if self.array.losses is None else float(self.array.losses[self.slot])

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the weights under the model's own names: what a serial model would save."""
        self.array.restore_buffers(self.slot)
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.model.state_dict().items()
        }

    def save(self, path: str | Path) -> None:
        """Write the weights as a safetensors file that any model of this architecture loads."""
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, str(path))

    def copy(self) -> nn.Module:
        """The model with memory of its own, as it is now."""
        self.array.restore_buffers(self.slot)
        return independent_copy(self.model)

    def checkpoint(self) -> dict[str, Any]:
        """Copies of everything needed to continue: weights, optimizers, schedulers."""
        own = self.array.slots[self.slot]
        return {
            "model": self.state_dict(),
            "optimizers": {name: copy.deepcopy(o.state_dict()) for name, o in own.optimizers.items()},
            "schedulers": [copy.deepcopy(s.state_dict()) for s in own.schedulers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, of this or another slot."""
        own = self.array.slots[self.slot]
        self.model.load_state_dict(state["model"])
        for name, optimizer in own.optimizers.items():
            optimizer.load_state_dict(copy.deepcopy(state["optimizers"][name]))
        for scheduler, saved in zip(own.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(saved))

    def stop(self) -> None:
        """Train no further."""
        self.array.stop(self.slot)

    def __repr__(self) -> str:
        return f"Member({self.slot}, {type(self.model).__name__}, {self.status})"
