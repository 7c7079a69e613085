"""One slide for each rank: every rank runs the whole network on its own share, and gradients are averaged.

Slides differ in size, and one that does not fit is streamed in tiles; neither can be cut into micro-batches of a
pipeline. But the ranks are independent until the update, so each is a plain runner, within its budget or in tiles as on
one rank, and what they share is one all-reduce of all gradients and of the loss, on the host.

Weights are the same on all ranks: all begin from the first rank's, and all make the same update. Buffers that a step
updates (running statistics) are averaged over the ranks before they are read or saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outcore.run.ranks.world import World
from outcore.train.examples.feed import MicroBatch
from outcore.train.runners.runner import PlainRunner, StepOutcome

__all__ = ["ReplicaRunner"]


class ReplicaRunner(PlainRunner):
    """Steps on a share of every batch, with the gradients of all of it."""

    whole_steps = True

    def __init__(self, world: World, *args: Any, seed: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._world = world
        self.rank, self.replica = world.rank, (world.rank, world.size)
        self._seed, self._loss_of_all = seed, 0.0
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.copy_(world.broadcast_(tensor.detach().cpu().contiguous(), 0))
        self._draw(0)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """A step over the shares of all ranks; every rank returns the same."""
        outcome = super().step(micro_batches)
        return replace(outcome, loss=self._loss_of_all)

    def _update(self, loss: float) -> tuple[float | None, bool]:
        assert self.optimizer is not None
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        held = torch.cat([p.detach().new_tensor([p.grad is not None], dtype=torch.float64) for p in trained])
        anywhere = self._world.sum_(held.cpu())
        rows = [self._own(p) for p, used in zip(trained, anywhere.tolist(), strict=True) if used]
        total = self._world.sum_(torch.cat([*rows, torch.tensor([loss], dtype=torch.float64, device="cpu")]))
        total /= self._world.size
        self._loss_of_all = float(total[-1])
        at = 0
        for p, used in zip(trained, anywhere.tolist(), strict=True):
            if used:
                p.grad = total[at : at + p.numel()].view(p.shape).to(p.device, p.dtype)
                at += p.numel()
        return super()._update(self._loss_of_all)

    def _own(self, parameter: Tensor) -> Tensor:
        """This rank's gradient, in the precision in which it is summed."""
        if parameter.grad is None:
            return torch.zeros(parameter.numel(), dtype=torch.float64, device="cpu")
        return parameter.grad.detach().reshape(-1).to("cpu", torch.float64)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, Any]:
        """The loss in eval mode, the same on all ranks, and what the model returns on the first."""
        if self.model.training:
            self._average_buffers()
        loss, output = super().evaluate(micro_batch)
        return loss, output if self.rank == 0 else None

    def agree(self, stop_request: int) -> int:
        """The signal that any rank was sent, the same on all; 0 for none."""
        return max(row[0] for row in self._world.numbers([stop_request]))

    def broadcast(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures of the first rank, on all."""
        return dict(self._world.share(figures)[0])

    def replan(self) -> str | None:
        """Return None: the ranks would have to change their plans together."""
        return None

    def save(self, path: Path, position: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint: the first rank has all of it."""
        self._average_buffers()
        failed = ""
        if self.rank == 0:
            try:
                super().save(path, position, keep=keep)
            except Exception as error:  # the others must not wait for it
                failed = str(error) or type(error).__name__
        if said := self._world.share(failed)[0]:
            raise OSError(said)
        self._draw(int(position["position"]["step"]))

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint back, on every rank."""
        state = super().load(path)
        self._draw(int(state["position"]["step"]))
        return state

    def close(self) -> None:
        """Leave the other ranks."""
        self._world.close()

    def _average_buffers(self) -> None:
        for buffer in self.model.buffers():
            if buffer.is_floating_point() and not buffer.is_meta:
                mean = self._world.sum_(buffer.detach().to("cpu", torch.float64)) / self._world.size
                with torch.no_grad():
                    buffer.copy_(mean.to(buffer.dtype))

    def _draw(self, step: int) -> None:
        """Random numbers that are other ones on every rank, and the same after a checkpoint as without one."""
        torch.manual_seed(hash((self._seed, self.rank, step)) % 2**63)
