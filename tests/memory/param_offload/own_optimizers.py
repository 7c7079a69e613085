"""Optimizers as users write them: some update each parameter by itself, some do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OWN", "SEPARABLE", "Averaged", "Noisy"]


class _Momentum(torch.optim.Optimizer):
    """SGD with momentum; what the others change is the factor of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad * factor)
                    p.add_(momentum, alpha=-group["lr"])


class Plain(_Momentum):
    """Nothing but that."""


class Averaged(_Momentum):
    """Divides by the norm over all gradients."""

    def factor(self) -> Any:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return 1 / (torch.stack(norms).norm() + 1e-6)


class StepsOfGroups(_Momentum):
    """Counts its steps in the groups, as timm's LAMB does."""

    def factor(self) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return 1 / (1 + self.param_groups[0]["step"])


class OwnSteps(_Momentum):
    """Counts its steps in itself, and looks at them only now and then."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count = 0

    def factor(self) -> Any:
        self.count += 1
        return 2.0 if self.count % 1000 == 0 else 1.0


class Noisy(_Momentum):
    """Langevin dynamics: noise on every parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


class SharpnessAware(_Momentum):
    """Takes the gradient at the worst place nearby, by way of the closure."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moves = [p.grad * (0.05 / (norm + 1e-12)) for p in held]
        for p, move in zip(held, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(held, moves, strict=True):
            p.sub_(move)
        super().step()


OWN = [Plain, Averaged, StepsOfGroups, OwnSteps, Noisy, SharpnessAware]
SEPARABLE = [Plain]
