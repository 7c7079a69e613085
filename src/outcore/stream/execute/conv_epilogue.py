"""The epilogue of a convolution in one pass: add the shift, add the skip, apply ReLU.

After folding (`outcore.stream.execute.fold_batch_norm`) a residual block is convolutions with a shift per channel, a
sum and ReLUs. Written out, these are three passes over memory that the convolution has just written, and they cost more
than the convolution. On a GPU they are one Triton kernel, in place; backward masks the gradient and sums it per channel
in one more. Elsewhere the same is done by torch's own operations.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["finish", "is_fused"]


@functools.cache
def _triton() -> Any:
    try:
        from outcore.kernels import bias_relu
    except ImportError:
        return None
    return bias_relu


def is_fused(y: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the kernel takes these: 2-D images on a GPU, channels last."""
    if not (y.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or y.dim() != 4 or _is_fake(y) or _triton() is None:
        return False
    if y.shape[1] == 1 or not y.is_contiguous(memory_format=torch.channels_last):
        return False
    return residual is None or (residual.shape == y.shape and residual.stride(1) == 1 and residual.dtype == y.dtype)


def finish(y: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """relu(y + shift + residual); y may be overwritten."""
    if is_fused(y, residual):
        made: torch.Tensor = _Finish.apply(y, shift, residual, relu)  # type: ignore[no-untyped-call]
        return made
    y = y + shift.to(y.dtype).reshape(1, -1, *(1,) * (y.dim() - 2))
    y = y + residual if residual is not None else y
    return F.relu(y) if relu else y


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor | None, relu: bool
    ) -> torch.Tensor:
        _triton().biased(y, shift, residual, relu=relu, rounded=False)
        ctx.mark_dirty(y)
        ctx.relu, ctx.has_residual, ctx.dtype = relu, residual is not None, shift.dtype
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        result, summed = _triton().gradients(gradient, z, ctx.dtype, relu=ctx.relu)
        return result, summed, result if ctx.has_residual else None, None


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
