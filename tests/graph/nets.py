"""Small networks made of a function and parts to call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Double", "Net", "conv", "double", "image"]


class Double(torch.autograd.Function):
    """A backward that no inlined forward would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


double = Double.apply  # bound long before anybody records


class Net(nn.Module):
    """A module from a function, with parts to call."""

    def __init__(self, forward: Any, **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 4, 8, 8), generator=torch.Generator().manual_seed(3))


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)
