"""The largest values of a batch norm along the positions, without the norm of all the others.

PointNet describes a cloud by the largest value that any of its points has in each channel. What is normalised there is
the largest map of the network, and all but one of its positions are dropped. A norm is monotone in every channel, and
so is ReLU: the largest of what they give is what they give for the largest, or for the smallest where the weight is
negative. So one pass over the norm's input finds the statistics and both, and only one number per cloud and channel is
normalised. Backward needs one more: every position has a share in the statistics.

                 norm, ReLU and maximum                                                    here
    forward      read; read, write; read, write; read                                      read
    backward     write; read 2, write; read 2; read 2, write                               read, write
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

Running = tuple[Tensor, Tensor] | None
"""The running mean and variance, which are updated."""


def norm_max(
    x: Tensor, weight: Tensor, bias: Tensor, running: Running, momentum: float, eps: float, *, relu: bool
) -> tuple[Tensor, Tensor]:
    """Of ``[samples, positions, channels]``, contiguous: the largest along the positions, and where they are."""
    values, where = _NormMax.apply(x, weight, bias, running, momentum, eps, relu)  # type: ignore[no-untyped-call]
    return values, where


class _NormMax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Running, momentum: float, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor]:
        """Statistics, extremes, and the norm of those that are selected."""
        count = x.shape[0] * x.shape[1]
        sums, extremes, places = _scan(x)
        off, square = (sums.double().sum(1) / count).unbind(0)
        mean, variance = x[0, 0].double() + off, (square - off * off).clamp_min_(0)
        if running is not None:
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_((variance * (count / (count - 1))).to(running[1].dtype), momentum)
        kind = sums.dtype
        mean, invstd = mean.to(kind), (variance + eps).rsqrt_().to(kind)
        upward = weight.detach() >= 0
        centred = torch.where(upward, extremes[0], extremes[1]) - mean
        where = torch.where(upward, places[0], places[1])
        values = centred * (invstd * weight.detach()) + bias.detach()
        ctx.save_for_backward(
            x, where, centred, (values > 0) if relu else torch.empty(0, device="cpu"), mean, invstd, weight
        )
        ctx.relu = relu
        indices = where.long()
        ctx.mark_non_differentiable(indices)
        return (values.relu() if relu else values).to(x.dtype), indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        """The gradient at the selected positions, less what all positions change in the statistics."""
        x, where, centred, open_, mean, invstd, weight = ctx.saved_tensors
        count = x.shape[0] * x.shape[1]
        g = grad.to(centred.dtype)
        if ctx.relu:
            g = torch.where(open_, g, 0)
        total, along = g.sum(0), (g * centred).sum(0)
        per_channel = (mean, invstd * weight.to(mean.dtype), total / count, invstd.square() * along / count)
        back = _spread(x, g.contiguous(), where, per_channel)
        return back, (along * invstd).to(weight.dtype), total.to(weight.dtype), None, None, None, None


def _scan(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and not isinstance(x, FakeTensor):
        from outcore.kernels.batch_norm_max import scan

        found: tuple[Tensor, Tensor, Tensor] = scan(x)
        return found
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    shape = (2, x.shape[0], x.shape[2])
    if isinstance(x, FakeTensor):  # a dry run: only sizes count
        sums = x.new_empty(shape, dtype=kind)
        return sums, torch.empty_like(sums), x.new_empty(shape, dtype=torch.int32)
    less = x.to(kind) - x[0, 0].to(kind)
    (top, top_at), (low, low_at) = x.max(1), x.min(1)
    sums = torch.stack([less.sum(1), less.square().sum(1)])
    return sums, torch.stack([top, low]).to(kind), torch.stack([top_at, low_at]).int()


def _spread(x: Tensor, grad: Tensor, where: Tensor, per_channel: tuple[Tensor, ...]) -> Tensor:
    if isinstance(x, FakeTensor):
        return torch.empty_like(x)
    if x.is_cuda:
        from outcore.kernels.batch_norm_max import spread

        return spread(x, grad, where, per_channel)
    mean, factor, shift, slope = per_channel
    at = torch.zeros_like(x, dtype=grad.dtype).scatter_(1, where.long().unsqueeze(1), grad.unsqueeze(1))
    return ((at - shift - (x.to(grad.dtype) - mean) * slope) * factor).to(x.dtype)
