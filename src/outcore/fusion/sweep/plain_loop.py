"""Members one after the other, in plain PyTorch: what a sweep runs where fusing does not pay.

Running members one by one inside a fused array costs a tiny model half as much again, in bookkeeping that is not needed
there. This is the loop that one would write by hand, behind the few methods that a sweep uses: each member has its
model, its optimizer and its random numbers, so its results do not depend on its neighbours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outcore.fusion.training import MemberTraining
from outcore.graph.record.preserve import evaluating
from outcore.graph.structure import substitute

MakeOptimizer = Callable[[Any, int], torch.optim.Optimizer]


@dataclass
class PlainMember:
    """One member."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    random_state: Tensor
    """State of its random generator."""
    status: Literal["training", "stopped", "diverged"] = "training"

    def save(self, path: str | Path) -> None:
        """Write the weights as a safetensors file that any model of this architecture loads."""
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in self.model.state_dict().items()}, str(path))


class PlainLoop:
    """Members of one architecture that train one after the other."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        loss: Callable[..., Tensor],
        optimizer: MakeOptimizer,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._loss, self._optimizer, self._autocast = loss, optimizer, autocast
        self.device = next((p.device for p in models[0].parameters()), torch.device("cpu"))
        self.members = [self._member(model, i) for i, model in enumerate(models)]

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, slot: int) -> PlainMember:
        return self.members[slot]

    @property
    def status(self) -> list[str]:
        """training, stopped or diverged, of every member."""
        return [member.status for member in self.members]

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train every member that is not stopped on a batch; returns the losses, one per member."""
        return self._each(inputs, targets, train=True)

    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """Losses on a batch without training, in eval mode."""
        with torch.no_grad():
            return self._each(inputs, targets, train=False)

    def stop(self, slot: int) -> None:
        """Train a member no further."""
        if self.members[slot].status == "training":
            self.members[slot].status = "stopped"

    def refill(self, slot: int, model: nn.Module) -> None:
        """Give a slot to another model; it starts with a fresh optimizer."""
        self.members[slot] = self._member(model, slot)

    def keep(self, slots: Sequence[int]) -> None:
        """Continue with these members only, in this order."""
        self.members = [self.members[slot] for slot in slots]

    def _member(self, model: nn.Module, slot: int) -> PlainMember:
        generator = torch.Generator(self.device).manual_seed(slot)
        return PlainMember(model, self._optimizer(model.parameters(), slot), generator.get_state())

    def _each(self, inputs: Any, targets: Any, *, train: bool) -> Tensor:
        inputs, targets = substitute((inputs, targets), Tensor, lambda t: t.to(self.device))
        given = inputs if isinstance(inputs, (dict, tuple, list)) else (inputs,)
        losses = torch.full((len(self.members),), torch.nan, dtype=torch.float64, device="cpu")
        for i, member in enumerate(self.members):
            if member.status == "training":
                with self._drawing(member), contextlib.nullcontext() if train else evaluating(member.model):
                    losses[i] = self._train(member, given, targets) if train else self._compute(member, given, targets)
        return losses

    def _train(self, member: PlainMember, inputs: Any, targets: Any) -> Tensor:
        member.optimizer.zero_grad()
        loss = self._compute(member, inputs, targets)
        if not torch.isfinite(loss.detach()):
            member.status = "diverged"
            return loss.detach()
        loss.backward()
        member.optimizer.step()
        return loss.detach()

    def _compute(self, member: PlainMember, inputs: Any, targets: Any) -> Tensor:
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            loss: Tensor = MemberTraining(member.model, self._loss).forward(inputs, targets)[0]
        return loss

    @contextlib.contextmanager
    def _drawing(self, member: PlainMember) -> Iterator[None]:
        """A context in which random numbers are the member's own."""
        on_gpu = self.device.type == "cuda"
        generator = torch.cuda.default_generators[self.device.index or 0] if on_gpu else torch.default_generator
        before = generator.get_state()
        generator.set_state(member.random_state)
        try:
            yield
        finally:
            member.random_state = generator.get_state()
            generator.set_state(before)
