"""Members that run together.

A group is a set of members that share one stack and one replay. An array of sixteen is one group of sixteen where fused
operations pay, sixteen groups of one, each on a stream of its own, where they do not, or four groups of four one after
the other where memory allows no more. Nothing else changes: parameters, optimizers and results are the same.

A group of one member may run the model itself instead of a replay: that is how a model runs that cannot be replayed
for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import FuseError
from outcore.fusion.optimizer.loss_scale import MemberLossScale
from outcore.fusion.optimizer.stacked_optimizer import StackedOptimizer
from outcore.fusion.program.call import MemberRandomness
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.program.values import Stacked, member_of
from outcore.fusion.stack import Stack
from outcore.fusion.training import MemberTraining
from outcore.graph.structure import leaves, substitute


@dataclass(slots=True)
class GroupOutcome:
    """The results of a step of a group, members first."""

    losses: Tensor
    metrics: dict[str, Tensor]
    output: Any

    @classmethod
    def joined(cls, outcomes: Sequence[GroupOutcome], *, outputs: bool) -> GroupOutcome:
        """The results of all groups as one; without `outputs` those stay as the groups left them: joining would copy
        them."""

        def cat(parts: Sequence[Tensor]) -> Tensor:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))

        metrics = {name: cat([o.metrics[name] for o in outcomes]) for name in outcomes[0].metrics}
        if outputs or len(outcomes) == 1:
            rows = iter(list(zip(*([t for _, t in leaves(o.output, Tensor)] for o in outcomes), strict=True)))
            output = substitute(outcomes[0].output, Tensor, lambda _: cat(next(rows)))
        else:
            output = [o.output for o in outcomes]
        return cls(cat([o.losses for o in outcomes]), metrics, output)


@dataclass(frozen=True, slots=True)
class TrainingTerms:
    """Clipping, loss weights, loss scales and precision of all members of an array."""

    clip: Tensor | None = None
    weights: Tensor | None = None
    scale: MemberLossScale | None = None
    autocast: torch.dtype | None = None

    def only(self, slots: Sequence[int]) -> TrainingTerms:
        """The same for some of the members."""
        clip, weights = (None if t is None else t[list(slots)] for t in (self.clip, self.weights))
        return TrainingTerms(clip, weights, None if self.scale is None else self.scale.only(slots), self.autocast)


class Group:
    """Consecutive members of an array that run as one."""

    def __init__(
        self,
        first: int,
        trainings: Mapping[str, Sequence[MemberTraining]],
        optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
        randomness: MemberRandomness,
        terms: TrainingTerms,
    ) -> None:
        self.first, self.randomness, self.terms = first, randomness, terms
        self.trainings = {name: list(members) for name, members in trainings.items()}
        self.stack = Stack([t.model for t in next(iter(self.trainings.values()))])
        self.steppers = {name: StackedOptimizer(self.stack, members) for name, members in optimizers.items()}
        self.device = next((t.device for t in self.stack.parameters.values()), torch.device("cpu"))
        self.alive = torch.ones(len(self), dtype=torch.bool, device=self.device)
        """Which members are trained; a member with a loss that is not finite drops out."""
        self.weights = self._own(terms.weights)
        self.clip = self._own(terms.clip)

    def __len__(self) -> int:
        return len(self.stack)

    @property
    def models(self) -> list[nn.Module]:
        """The members' models."""
        return self.stack.models

    def forward(
        self, objective: str, program: StackedProgram, args: tuple[Any, ...], *, own_model: bool
    ) -> GroupOutcome:
        """Losses, metrics and outputs of all members on a batch; with `own_model`, by the one member's own forward."""
        members = self.trainings[objective]
        with self.autocast():
            if own_model or program.obstacle is not None:
                if len(self) != 1:
                    raise FuseError("a group of several members cannot run a model that must run by itself")
                with self.randomness.of(self.first):
                    made = members[0](*member_of(args, 0))
                made = substitute(made, Tensor, lambda t: Stacked(t.unsqueeze(0)))
            else:
                tensors = [t for _, t in leaves(args, (Tensor, Stacked))]
                made = program.replay(members, self.stack, tensors, self.randomness, self.first)
        loss, metrics, output = made
        if not isinstance(loss, Stacked) or loss.rank != 0:
            shape = tuple(loss.tensor.shape[1:]) if isinstance(loss, Stacked) else "a value that no parameter changes"
            raise FuseError(f"the loss of a member is {shape}; it must be one number, for example the mean")
        measured = {name: self._spread(value).tensor.detach() for name, value in metrics.items()}
        return GroupOutcome(loss.tensor, measured, substitute(output, Stacked, lambda s: s.tensor.detach()))

    def gradients(self, objective: str, losses: Tensor, *, own_model: bool) -> dict[str, Tensor]:
        """Gradients of every member's own loss, stacked."""
        names = [n for n in self.steppers[objective].names if self.stack.parameters[n].requires_grad]
        wanted = [self.stack.member(n, 0) if own_model else self.stack.parameters[n] for n in names]
        for leaf in wanted:
            leaf.grad = None
        weighted = losses if self.weights is None else losses * self.weights.to(losses.dtype)
        torch.autograd.backward(weighted.sum(), inputs=wanted)
        found = {}
        for name, leaf in zip(names, wanted, strict=True):
            if leaf.grad is not None:
                found[name] = leaf.grad.unsqueeze(0) if own_model else leaf.grad
                leaf.grad = None
        return found

    def compute(
        self, objective: str, program: StackedProgram, args: tuple[Any, ...], *, own_model: bool
    ) -> tuple[GroupOutcome, dict[str, Tensor]]:
        """Forward and backward; members whose loss is not finite are not alive afterwards."""
        outcome = self.forward(objective, program, args, own_model=own_model)
        scale = self.terms.scale
        losses = outcome.losses
        if scale is not None:
            losses = losses * scale.of(self.first, len(self), self.device)
        grads = self.gradients(objective, losses, own_model=own_model)
        outcome.losses = outcome.losses.detach()
        self.alive &= outcome.losses.isfinite()
        return outcome, grads

    def update(self, objective: str, grads: Mapping[str, Tensor]) -> None:
        """Clip and step, once the numbers of the step are on the device; only kernels where no loss scale is used."""
        if self.clip is not None:
            clip_by_norm(grads, self.clip)
        self.steppers[objective].apply(grads, self.alive)

    def step(self, objective: str, program: StackedProgram, args: tuple[Any, ...], *, own_model: bool) -> GroupOutcome:
        """One training step, eagerly."""
        outcome, grads = self.compute(objective, program, args, own_model=own_model)
        alive, scale = self.alive, self.terms.scale
        if scale is not None:
            alive = alive & scale.unscale(grads, self.first)
        if self.clip is not None:
            clip_by_norm(grads, self.clip)
        stepper = self.steppers[objective]
        stepper.prepare(list(grads), None if scale is None else alive.tolist())
        whole = self.device.type == "cpu" and bool(alive.all())
        stepper.apply(grads, None if whole else alive)
        return outcome

    def autocast(self) -> Any:
        """The precision of forward, as asked for here or around the call."""
        if self.terms.autocast is not None:
            return torch.autocast(self.device.type, self.terms.autocast, cache_enabled=False)
        torch.clear_autocast_cache()  # it may hold weights of before the last step
        return torch.autocast(self.device.type, enabled=torch.is_autocast_enabled(self.device.type))

    def _own(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else values[self.first : self.first + len(self)].to(self.device)

    def _spread(self, value: Any) -> Stacked:
        if isinstance(value, Stacked):
            return value
        return Stacked(torch.as_tensor(value, device=self.device).expand(len(self), *getattr(value, "shape", ())))


def norms(grads: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all gradients of each member."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return total


def clip_by_norm(grads: Mapping[str, Tensor], limits: Tensor) -> Tensor:
    """Scale every member's gradients to its limit where they exceed it; returns the norms before."""
    before = norms(grads)
    factors = (limits.to(before.dtype) / (before + 1e-6)).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(factors.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))
    return before
