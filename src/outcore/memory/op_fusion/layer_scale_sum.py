"""A residual and a scaled branch, added in one pass over memory each way.

    out = residual + branch * parameter per channel * number per image

Where the next layer wants the result in another type too, both are written in the same pass, and their gradients are
added in backward's. Computation is in single precision (double, if that is the type). Tensors whose layout the kernels
do not support are computed by torch. Gradients of gradients do not exist.
"""

from __future__ import annotations

from typing import Any

import torch

from outcore.graph.strides import has_known_format


class LayerScaleSum:
    """The sum of a residual and a scaled branch."""

    def __init__(self, dim: int, kind: torch.dtype, copy_kind: torch.dtype | None = None) -> None:
        self.dim, self.kind, self.copy_kind = dim, kind, copy_kind

    def __call__(
        self, x: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        width, numbers = x.shape[self.dim], x.numel()
        whole = (
            has_known_format(x)
            and x.stride() == residual.stride()
            and x.stride(self.dim) == 1
            and scale.numel() == width
        )
        outermost = noise is None or noise.numel() == 1 or x.stride(0) * noise.numel() == numbers
        if not whole or not outermost or not numbers:
            by = scale.reshape([width if i == self.dim else 1 for i in range(x.dim())])
            total = (residual + (x * by if noise is None else x * by * noise)).to(self.kind)
            return total if self.copy_kind is None else (total, total.to(self.copy_kind))
        given = (x, scale, noise, residual, self.dim, self.kind, self.copy_kind)
        result: Any = _Sum.apply(*given)  # type: ignore[no-untyped-call]
        return result  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        noise: torch.Tensor | None,
        residual: torch.Tensor,
        dim: int,
        kind: torch.dtype,
        copy_kind: torch.dtype | None,
    ) -> Any:
        """Products and sum in one pass."""
        ctx.save_for_backward(x, scale, noise)
        ctx.dim, ctx.kind = dim, residual.dtype
        out = torch.empty_like(x, dtype=kind)
        copy = None if copy_kind is None else torch.empty_like(x, dtype=copy_kind)
        if x.is_cuda:
            from outcore.kernels.layer_scale import summed

            summed(x, scale, noise, residual, out, copy)
        else:
            by = _factor(x, scale, noise, dim)
            out.copy_(residual.to(by.dtype) + x.to(by.dtype) * by)
            copy = copy.copy_(out) if copy is not None else None
        return out if copy is None else (out, copy)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, of_copy: torch.Tensor | None = None) -> Any:
        """The gradients of branch and scale in one pass; the residual's is passed on, or written in that pass if there
        are two."""
        x, scale, noise = ctx.saved_tensors
        g, h = (t if t is None or t.stride() == x.stride() else _alike(t, x) for t in (gradient, of_copy))
        assert g is not None
        if x.is_cuda:
            from outcore.kernels.layer_scale import gradients

            back, total, both = gradients(g, h, x, scale, noise, sums=ctx.needs_input_grad[1])
        else:
            by = _factor(x, scale, noise, ctx.dim)
            both = None if h is None else g.to(by.dtype) + h.to(by.dtype)
            wide = g.to(by.dtype) if both is None else both
            back = torch.empty_like(x).copy_(wide * by)
            along = wide * x.to(by.dtype)
            along = along if noise is None else along * noise.to(by.dtype)
            total = along.sum([i for i in range(x.dim()) if i != ctx.dim])
        of_scale = None if total is None else total.to(scale.dtype).view(scale.shape)
        return back, of_scale, None, (gradient if both is None else both).to(ctx.kind), None, None, None


def _alike(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor in the layout of another."""
    return torch.empty_like(x, dtype=t.dtype).copy_(t)


def _factor(x: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor | None, dim: int) -> torch.Tensor:
    """The factor of every element of a branch."""
    precision = torch.promote_types(x.dtype, torch.float32)
    by = scale.detach().to(precision).reshape([x.shape[dim] if i == dim else 1 for i in range(x.dim())])
    return by if noise is None else by * noise.to(precision)
