"""Members that run together.

A lane is a set of members that share one stack and one replay. An array of sixteen is one lane of sixteen where fused
operations pay, sixteen lanes of one, each on a stream of its own, where they do not, or four lanes of four one after
the other where memory allows no more. Nothing else changes: parameters, optimizers and results are the same.

A lane of one member may run the model itself instead of a replay: that is how a model runs that cannot be replayed
for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import FuseError
from outcore.fusion.call import Randomness
from outcore.fusion.program import Program
from outcore.fusion.stack import Stack
from outcore.fusion.stepper import Stepper
from outcore.fusion.training import Training
from outcore.fusion.values import Stacked, member_of
from outcore.graph.structure import leaves, substitute

__all__ = ["Lane", "Outcome"]


@dataclass(slots=True)
class Outcome:
    """What a step of a lane gave, members first."""

    losses: Tensor
    metrics: dict[str, Tensor]
    output: Any


class Lane:
    """Consecutive members of an array that run as one."""

    def __init__(
        self,
        first: int,
        trainings: Mapping[str, Sequence[Training]],
        optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
        randomness: Randomness,
    ) -> None:
        self.first, self.randomness = first, randomness
        self.trainings = {name: list(members) for name, members in trainings.items()}
        models = [t.model for t in next(iter(self.trainings.values()))]
        self.stack = Stack(models)
        self.steppers = {name: Stepper(self.stack, members) for name, members in optimizers.items()}
        device = next((t.device for t in self.stack.parameters.values()), torch.device("cpu"))
        self.alive = torch.ones(len(models), dtype=torch.bool, device=device)
        self.weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.stack)

    @property
    def models(self) -> list[nn.Module]:
        """The members' models."""
        return self.stack.models

    def forward(self, objective: str, program: Program, args: tuple[Any, ...], *, alone: bool) -> Outcome:
        """Losses, metrics and outputs of all members on a batch."""
        members = self.trainings[objective]
        if alone or program.obstacle is not None:
            if len(self) != 1:
                raise FuseError("a lane of several members cannot run a model that must run by itself")
            with self.randomness.of(self.first):
                loss, metrics, output = members[0](*member_of(args, 0))
            loss, metrics, output = substitute((loss, metrics, output), Tensor, lambda t: Stacked(t.unsqueeze(0)))
        else:
            tensors = [t for _, t in leaves(args, (Tensor, Stacked))]
            loss, metrics, output = program.replay(members, self.stack, tensors, self.randomness, self.first)
        if not isinstance(loss, Stacked) or loss.rank != 0:
            shape = tuple(loss.tensor.shape[1:]) if isinstance(loss, Stacked) else "a value that no parameter changes"
            raise FuseError(f"the loss of a member is {shape}; it must be one number, for example the mean")
        measured = {name: self._spread(value).tensor.detach() for name, value in metrics.items()}
        return Outcome(loss.tensor, measured, substitute(output, Stacked, lambda s: s.tensor.detach()))

    def gradients(self, objective: str, losses: Tensor, *, alone: bool) -> dict[str, Tensor]:
        """Gradients of every member's own loss, stacked."""
        names = [n for n in self.steppers[objective].names if self.stack.parameters[n].requires_grad]
        wanted = [self.stack.member(n, 0) if alone else self.stack.parameters[n] for n in names]
        for leaf in wanted:
            leaf.grad = None
        weighted = losses if self.weights is None else losses * self.weights
        torch.autograd.backward(weighted.sum(), inputs=wanted)
        found = {}
        for name, leaf in zip(names, wanted, strict=True):
            if leaf.grad is not None:
                found[name] = leaf.grad.unsqueeze(0) if alone else leaf.grad
                leaf.grad = None
        return found

    def update(self, objective: str, grads: Mapping[str, Tensor], *, masked: bool) -> None:
        """Step the optimizers of the members that are alive."""
        self.steppers[objective].apply(grads, self.alive if masked else None)

    def _spread(self, value: Any) -> Stacked:
        if isinstance(value, Stacked):
            return value
        return Stacked(torch.as_tensor(value, device=self.alive.device).expand(len(self), *getattr(value, "shape", ())))
