"""What belongs to one member of an array besides its tensors, and how it is made.

The user gives functions: of a loss, of an optimizer for member `i`, of its schedule. A `MemberFactory` holds them and
makes a `MemberState` of any model, at the beginning and whenever a slot is given to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outcore.fusion.training import MemberTraining

DEFAULT = "loss"
"""The objective of an array that has one."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One of several losses of a model, each with an optimizer of its own (a GAN has two).

    `loss` takes the model and the batch, `optimizer` the model and the member's index.
    """

    loss: Callable[..., Tensor]
    optimizer: Callable[[nn.Module, int], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class MemberFactory:
    """How members are made trainable; the same for all slots."""

    loss: Callable[..., Tensor] | None
    metrics: Mapping[str, Callable[..., Tensor]]
    objectives: Mapping[str, Objective]
    optimizers: Callable[[nn.Module, int], dict[str, torch.optim.Optimizer]]
    scheduler: Callable[[torch.optim.Optimizer, int], Any] | None
    outputs: bool = False

    def slot(self, model: nn.Module, index: int) -> MemberState:
        """The state of a new member for a slot."""
        optimizers = self.optimizers(model, index)
        made = [self.scheduler(o, index) for o in optimizers.values()] if self.scheduler is not None else []
        flat = [s for m in made for s in (m if isinstance(m, list | tuple) else [m])]
        return MemberState(self._trainings(model), optimizers, flat)

    def _trainings(self, model: nn.Module) -> dict[str, MemberTraining]:
        if self.objectives:
            return {name: MemberTraining(model, None, o.loss) for name, o in self.objectives.items()}
        return {DEFAULT: MemberTraining(model, self.loss, None, self.metrics, outputs=self.outputs)}


@dataclass
class MemberState:
    """What belongs to one member, besides its tensors."""

    trainings: dict[str, MemberTraining]
    optimizers: dict[str, torch.optim.Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    status: str = "training"
    frozen: dict[str, Tensor] = field(default_factory=dict)
    """Buffers of a stopped member as they were: the others' steps go on updating them."""

    @property
    def model(self) -> nn.Module:
        """The user's own module."""
        return next(iter(self.trainings.values())).model
