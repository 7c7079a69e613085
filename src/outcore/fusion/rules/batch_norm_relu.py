"""Batch norm of all members in training, with the ReLU after it and the bias before it, in as few passes as they need.

The kernels are those of `outcore.memory`; to them the channels of all members are the channels of one norm. Where maps
are small, or the channels of a position do not lie side by side and there are few positions, torch's own norm is used.
If nothing but the largest values along the positions is wanted, only those are made (`outcore.fusion.rules.norm_max`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked, fold_channels, unfold_channels
from outcore.fusion.rules.norm_max import norm_max
from outcore.fusion.rules.normalisation import batch_norm

_ORDER = 3
"""The order of rounding in the kernels; any would do: ``(x - mean) * (invstd * weight) + bias``."""
_LONG = 256
"""Positions of a channel that are worth a program of their own."""
_LARGE = 2**22
"""With fewer elements, the kernels have fewer programs than an H200 has multiprocessors."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """The attributes of a module that the kernels need."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float
    eps: float


def norm_in_one_pass(
    call: FusedCall, bias_before: Stacked | None, *, relu: bool, largest: bool = False
) -> Stacked | tuple[Stacked, Stacked]:
    """The norm of a chain; where possible, also the largest values along the last dimension and their indices."""
    x, module = call.args[0], cast(Any, call.module)
    state = cast(dict[str, Stacked], call.state)
    tracks = module.track_running_stats and "running_mean" in state
    if tracks:
        state["num_batches_tracked"].tensor.add_(1)
    if not isinstance(x, Stacked):
        x = Stacked(x.unsqueeze(0).expand(call.members, *x.shape))
    folded = _folded(x) if x.rank > 2 and x.tensor.numel() >= _LARGE else None
    call.note("fused")
    if folded is None or not _suits(folded):
        own_mean, own_var = (state[name] if tracks else None for name in ("running_mean", "running_var"))
        if bias_before is not None:
            x = Stacked(x.tensor + bias_before.tensor.view(x.members, 1, -1, *[1] * (x.rank - 2)))
        y = batch_norm(x, own_mean, own_var, state["weight"], state["bias"], True, module.momentum, module.eps)
        return Stacked(F.relu(y.tensor)) if relu else cast(Stacked, y)
    mean, var = (state[name].tensor.view(-1) if tracks else None for name in ("running_mean", "running_var"))
    weight, bias = (state[name].tensor.flatten() for name in ("weight", "bias"))
    before = None if bias_before is None else bias_before.tensor.flatten()
    if before is not None:
        weight = _WithoutEffect.apply(weight, before)  # type: ignore[no-untyped-call]
    rows = folded.movedim(1, -1)
    made: tuple[Tensor, ...]
    if largest and rows.dim() == 3 and rows.is_contiguous():
        followed = None if mean is None or var is None else (mean, var)
        made = norm_max(rows, weight, bias, followed, module.momentum, module.eps, relu=relu)
    else:
        counted = torch.empty(1, dtype=torch.int64, device=folded.device)  # the kernels count for one model
        norm = _Norm(weight.detach(), bias.detach(), mean, var, counted, module.momentum, module.eps)
        made = (_OnePass.apply(folded, weight, bias, norm, relu),)  # type: ignore[no-untyped-call]
    if before is not None and mean is not None:
        mean.add_(before.detach(), alpha=module.momentum)
    first, *others = (unfold_channels(part, x.members) for part in made)
    return (first, *others) if others else first  # type: ignore[return-value]


def _folded(x: Stacked) -> Tensor:
    """``[N, B * C, ...]``, as it lies in memory where that is dense, contiguous or with channels last."""
    rows = x.tensor.movedim((0, 2), (-2, -1))  # [N, *space, B, C]
    if rows.is_contiguous():
        return rows.flatten(-2).movedim(-1, 1)
    folded = fold_channels(x)
    dense = folded.is_contiguous() or folded.movedim(1, -1).is_contiguous()
    return folded if dense else folded.contiguous()


def _suits(x: Tensor) -> bool:
    """Whether the kernels are fast on it."""
    several = x.numel() > x.shape[1]  # of one number per channel there is no deviation; torch says so
    side_by_side = not x.is_contiguous() or math.prod(x.shape[2:]) >= _LONG
    return x.is_cuda and several and side_by_side


class _WithoutEffect(torch.autograd.Function):
    """Gives a bias that the norm cancels a gradient of zero; without any, optimizers would skip it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


class _OnePass(torch.autograd.Function):
    """Statistics and normalising, one pass each; backward two sums and the gradient of the input, one pass each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: _Norm, relu: bool) -> Tensor:
        ctx.relu, ctx.kind = relu, weight.dtype
        if isinstance(x, FakeTensor):  # a dry run: only sizes count
            ctx.save_for_backward(x, x.new_empty(4 * x.shape[1], dtype=torch.float32))
            return torch.empty_like(x)
        from outcore.kernels.batch_norm_relu import normalise, statistics

        found = statistics(x, cast(Any, norm))
        ctx.save_for_backward(x, found)
        mean, invstd, *affine = found.view(4, -1).unbind(0)
        made: Tensor = normalise(x, mean, invstd, affine[0], affine[1], _ORDER, relu)
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, found = ctx.saved_tensors
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        if isinstance(x, FakeTensor):
            small = x.new_empty(x.shape[1], dtype=ctx.kind)
            return torch.empty_like(x), small, torch.empty_like(small), None, None
        from outcore.kernels.batch_norm_relu_backward import gradients

        return *gradients(grad, x, found, ctx.kind, _ORDER, ctx.relu), None, None
