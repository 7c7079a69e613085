"""Batch normalisation by the statistics of all copies of a stage.

Forward adds up counts, sums and sums of squares over the copies, backward the two sums that every element's gradient
depends on: the derivative of normalising the whole batch on one device (Ioffe and Szegedy 2015). The gradients of scale
and shift stay local; they are added up with those of all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["synchronised_norm"]


Total = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a row over all copies."""


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, total_of: Total) -> tuple[torch.Tensor, ...]:
        dims = [d for d in range(x.ndim) if d != 1]
        wide = x.double()
        count = wide.new_tensor([x.numel() // x.shape[1]])
        row = total_of(torch.cat([count, wide.sum(dims), (wide * wide).sum(dims)]))
        total, channels = row[0], x.shape[1]
        mean = row[1 : 1 + channels] / total
        var = (row[1 + channels :] / total - mean * mean).clamp(min=0)
        shape = [1, channels] + [1] * (x.ndim - 2)
        scale = (var + eps).rsqrt().view(shape)
        normal = ((wide - mean.view(shape)) * scale).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.total_of, ctx.total, ctx.dims, ctx.shape = total_of, float(total), dims, shape
        ctx.mark_non_differentiable(mean, var)
        return normal, mean, var, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normal, scale = ctx.saved_tensors
        got, n = gradients[0].double(), normal.double()
        row = ctx.total_of(torch.cat([got.sum(ctx.dims), (got * n).sum(ctx.dims)])) / ctx.total
        half = row.numel() // 2
        back = scale * (got - row[:half].view(ctx.shape) - n * row[half:].view(ctx.shape))
        return back.to(normal.dtype), None, None


def synchronised_norm(module: _BatchNorm, total_of: Total) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function to call in place of a layer."""

    def call(x: torch.Tensor) -> torch.Tensor:
        normal, mean, var, total = _Normalise.apply(x, module.eps, total_of)  # type: ignore[no-untyped-call]
        if module.running_mean is not None and module.running_var is not None:
            assert module.num_batches_tracked is not None
            module.num_batches_tracked += 1
            factor = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
            with torch.no_grad():
                unbiased = var * total / (total - 1)
                module.running_mean.copy_((1 - factor) * module.running_mean.double() + factor * mean)
                module.running_var.copy_((1 - factor) * module.running_var.double() + factor * unbiased)
        if module.affine:
            shape = [1, -1] + [1] * (x.ndim - 2)
            normal = normal * module.weight.view(shape) + module.bias.view(shape)
        made: torch.Tensor = normal
        return made

    return call
