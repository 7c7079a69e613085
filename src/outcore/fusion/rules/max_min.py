"""Largest and smallest elements along a dimension, for all members.

torch's own backward writes the gradient into a tensor of its own layout. A stacked value lies in memory as the
operation before left it (channels last after a 1x1 convolution), so the gradient of every operation before would be
read in one order and written in another; PointNet, whose largest values go through such a maximum, spent a third of
its memory traffic on it. Here the gradient is laid out as the value was.
"""

from __future__ import annotations

from typing import Any

import torch

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked

__all__ = ["extreme"]


def extreme(call: FusedCall) -> Any:
    """``max`` and ``min`` of one tensor along one dimension; NotImplemented for their other forms."""
    x, *rest = call.args
    named = dict(zip(("dim", "keepdim"), rest, strict=False)) | call.kwargs
    if not isinstance(x, Stacked) or type(named.get("dim")) is not int or named.keys() - {"dim", "keepdim"}:
        return NotImplemented
    dim = named["dim"] % max(1, x.rank) + 1
    if x.rank == 0:
        return NotImplemented
    call.note("fused")
    made = _Extreme.apply(x.tensor, call.target, dim, bool(named.get("keepdim", False)))  # type: ignore[no-untyped-call]
    return tuple(Stacked(part) for part in made)


class _Extreme(torch.autograd.Function):
    """Values and where they were; the gradient goes there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any, dim: int, keepdim: bool) -> tuple[torch.Tensor, ...]:
        values, where = function(x, dim, keepdim)
        ctx.save_for_backward(where)
        ctx.dim, ctx.keepdim = dim, keepdim
        ctx.shape, ctx.stride = x.shape, x.stride() if _is_dense(x) else None
        ctx.mark_non_differentiable(where)
        return values, where

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (where,) = ctx.saved_tensors
        if not ctx.keepdim:
            where, grad = where.unsqueeze(ctx.dim), grad.unsqueeze(ctx.dim)
        into = grad.new_empty(ctx.shape) if ctx.stride is None else grad.new_empty_strided(ctx.shape, ctx.stride)
        return into.zero_().scatter_(ctx.dim, where, grad), None, None, None


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
