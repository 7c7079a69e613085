"""Linear layers and 1x1 convolutions of all members as one batched matrix product.

A 1x1 convolution is a linear layer on the channels. Its result is written as ``[positions, members, channels]``,
which is the memory of a channels-last tensor of ``members * channels`` channels, so that normalisation, pooling and
grouped convolutions after it need no copy. torch's matrix products can write there (``out=``) but then not be
differentiated, hence the small functions with their own backward: three matrix products, as for one layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from outcore.fusion.program.values import Stacked, UnjoinedConcat, is_repeated


def linear(input: Any, weight: Any, bias: Any) -> Any:
    """``F.linear`` for all members; NotImplemented where that is no matrix product."""
    x = input
    if not isinstance(weight, Stacked):
        if isinstance(bias, Stacked) or not isinstance(x, Stacked):
            return NotImplemented
        return Stacked(F.linear(x.tensor, weight, bias))
    if weight.rank != 2 or (bias is not None and not isinstance(bias, Stacked)):
        return NotImplemented
    own = None if bias is None else bias.tensor
    if not isinstance(x, Stacked):
        return _shared_input(x, weight.tensor, own)
    rows = x.tensor.flatten(1, -2) if x.rank > 1 else x.tensor.unsqueeze(1)
    y: torch.Tensor = _Linear.apply(*lowered(rows, weight.tensor, own))  # type: ignore[no-untyped-call]
    return Stacked(y.unflatten(1, x.tensor.shape[1:-1]) if x.rank > 1 else y.squeeze(1))


def _shared_input(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Stacked:
    """The same rows for all members: one wide matrix product."""
    members = weight.shape[0]
    y = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return Stacked(y.unflatten(-1, (members, -1)).movedim(-2, 0))


def pointwise(x: Stacked, weight: torch.Tensor, bias: torch.Tensor | None) -> Stacked:
    """A 1x1 convolution ``[B, N, C, *space]`` with weights ``[B, out, C]``."""
    value, *own = lowered(x.tensor, weight, bias)
    assert value is not None
    channels_last = value.movedim(2, -1)
    y: torch.Tensor = _Pointwise.apply(channels_last.flatten(1, -2), *own)  # type: ignore[no-untyped-call]
    return Stacked(y.unflatten(1, channels_last.shape[1:-1]).movedim(-1, 2))


def lowered(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """A cast to the precision that autocast asks for: inside a function with its own backward autocast has no
    effect."""
    device = tensors[0].device.type if tensors[0] is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    low = torch.get_autocast_dtype(device)
    return [t.to(low) if t is not None else None for t in tensors]


def pointwise_joined(joined: UnjoinedConcat, weight: torch.Tensor, bias: torch.Tensor | None) -> Stacked:
    """A 1x1 convolution of parts along the channels, at least one of them repeated: that one is computed once, then
    added everywhere."""
    sizes = [part.tensor.shape[2] for part in joined.parts]
    repeated: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    for part, own in zip(joined.parts, weight.split(sizes, 2), strict=True):
        if is_repeated(part):
            first = part.tensor.flatten(3)[..., :1].unflatten(3, [1] * (part.rank - 2))
            made = pointwise(Stacked(first), own, bias if repeated is None else None).tensor
            repeated = made if repeated is None else repeated + made
        else:
            made = pointwise(part, own, None).tensor
            whole = made if whole is None else whole + made
    assert repeated is not None and whole is not None
    return Stacked(whole + repeated)


def pointwise_shared(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Stacked:
    """The same for an input that all members share: one wide matrix product on the channels."""
    y = F.linear(x.movedim(1, -1), weight.flatten(0, 1), None if bias is None else bias.flatten())
    return Stacked(y.unflatten(-1, (weight.shape[0], -1)).movedim((-2, -1), (0, 2)))


class _Linear(torch.autograd.Function):
    """``rows [B, M, in] @ weight [B, out, in]^T + bias``; the weight's gradient is laid out as the weight is.

    torch's own would be its transpose, which has to be copied before an optimizer can use it.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        w = weight.transpose(1, 2)
        return torch.bmm(rows, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        to_rows = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        to_weight = torch.bmm(grad.transpose(1, 2), rows) if ctx.needs_input_grad[1] else None
        to_bias = grad.sum(1) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return to_rows, to_weight, to_bias


class _Pointwise(torch.autograd.Function):
    """``rows [B, M, C] @ weight [B, out, C]^T + bias``, laid out as ``[M, B, out]``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return product(rows, weight.transpose(1, 2), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        to_rows = product(grad, weight, None) if ctx.needs_input_grad[0] else None
        to_weight = torch.bmm(grad.transpose(1, 2), rows) if ctx.needs_input_grad[1] else None
        to_bias = grad.sum(1) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return to_rows, to_weight, to_bias


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``[B, M, K] @ [B, K, out]``, laid out as ``[M, B, out]``."""
    members, rows, columns = a.shape[0], a.shape[1], b.shape[2]
    out = torch.empty(rows, members, columns, dtype=a.dtype, device=a.device).transpose(0, 1)
    if bias is None:
        return torch.bmm(a, b, out=out)
    return torch.baddbmm(bias.unsqueeze(1), a, b, out=out)
