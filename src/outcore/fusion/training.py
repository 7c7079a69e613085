"""A member's step as one module: its model, its loss, its metrics.

Captured as a whole, the loss is part of the recording, so every member's loss comes out of the same replay, and the sum
of the losses gives every member the gradients it would have by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Loss = Callable[..., torch.Tensor]


class MemberTraining(nn.Module):
    """A model with what it is trained on: ``forward(inputs, targets)`` returns loss, metrics and output."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        objective: Callable[..., torch.Tensor] | None = None,
        metrics: Mapping[str, Callable[..., torch.Tensor]] | None = None,
        *,
        outputs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.objective = objective
        self.metrics = dict(metrics or {})
        self.outputs = outputs
        """Whether the model's output is wanted too; it is as large as a feature map."""

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        """Loss, metrics by name, output of the model."""
        if self.objective is not None:
            return self.objective(self.model, *inputs), {}, None
        if isinstance(inputs, dict):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs)
        assert self.loss is not None
        loss = self.loss(output, targets) if targets is not None else self.loss(output)
        with torch.no_grad():
            found = {name: metric(output, targets) for name, metric in self.metrics.items()}
        return loss, found, output if self.outputs else None


@contextlib.contextmanager
def eval_mode(members: Sequence[MemberTraining]) -> Iterator[None]:
    """Put every module of all members in eval mode, and back as each was.

    Of hundreds of modules the flag is written directly: torch's way to set an attribute takes longer than a captured
    evaluation. A module with a `train` method of its own is asked.
    """
    modes = [(module, module.training) for member in members for module in member.modules()]
    plain = all(
        type(m).train is nn.Module.train and type(m).eval is nn.Module.eval and "training" in m.__dict__
        for m, _ in modes
    )
    try:
        for module in (m for m, _ in modes) if plain else ():
            module.__dict__["training"] = False
        for member in () if plain else members:
            member.eval()
        yield
    finally:
        for module, mode in modes:
            if plain:
                module.__dict__["training"] = mode
            else:
                module.training = mode
