"""Convolutions of all members as one batched matrix product of unfolded maps (im2col).

On maps of a few positions with many channels, grouped kernels are at their worst and unfolding costs little: every
window becomes a row, and the members' weights are applied to all rows of a member at once. Rows are recomputed in
backward instead of being saved, so that it takes no more memory than the convolution, except temporarily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.fusion.program.values import Stacked
from outcore.fusion.rules.matmul import lowered, product

if TYPE_CHECKING:
    from outcore.fusion.rules.convolution import MemberConvolution

__all__ = ["can_unfold", "unfolded"]

_MOST = 2**24
"""Elements of the rows of all members: beyond, writing them takes longer than it saves."""


def can_unfold(conv: MemberConvolution, x: Tensor, weight: Tensor) -> bool:
    """Whether ``[B, N, C, *space]`` by ``[B, out, C, *kernel]`` can be, and is small enough."""
    plain = not conv.transposed and conv.groups == 1 and set(conv.dilation) == {1} and not isinstance(conv.padding, str)
    return plain and x.numel() * weight[0, 0, 0].numel() <= _MOST


def unfolded(conv: MemberConvolution, x: Stacked, weight: Tensor, bias: Tensor | None) -> Stacked:
    """The convolution, in autocast's precision."""
    value, own, added = lowered(x.tensor, weight.movedim(2, -1).flatten(2), bias)
    made: Tensor = _Unfolded.apply(value, own, conv, tuple(weight.shape[3:]))  # type: ignore[no-untyped-call]
    y = made.movedim(-1, 2)
    return Stacked(y if added is None else y + added.view(y.shape[0], 1, -1, *[1] * conv.dims))


def _rows(conv: MemberConvolution, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Every window of ``[B, N, C, *space]`` as a row: ``[B, N, *out, window * C]``."""
    assert not isinstance(conv.padding, str)
    windows = F.pad(x, [p for pad in reversed(conv.padding) for p in (pad, pad)])
    for dim, (size, stride) in enumerate(zip(kernel, conv.stride, strict=True)):
        windows = windows.unfold(3 + dim, size, stride)
    return windows.movedim(2, -1).flatten(2 + conv.dims)


class _Unfolded(torch.autograd.Function):
    """``rows(x) @ weight [B, out, window * C]^T``, laid out as ``[N, *out, B, channels]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: MemberConvolution, kernel: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.kernel = conv, kernel
        rows = _rows(conv, x, kernel)
        y: Tensor = product(rows.flatten(1, -2), weight.transpose(1, 2), None).unflatten(1, rows.shape[1:-1])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(1, -2)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            rows = _rows(ctx.conv, leaf, ctx.kernel)
        to_weight = torch.bmm(flat.transpose(1, 2), rows.detach().flatten(1, -2)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None, None
        back = torch.bmm(flat, weight).unflatten(1, rows.shape[1:-1])
        return torch.autograd.grad(rows, leaf, back)[0], to_weight, None, None
