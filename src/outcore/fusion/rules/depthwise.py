"""Depthwise convolutions of all members, by kernels of our own.

A depthwise convolution reads and writes as much as it computes, and to it the channels of all members are simply more
channels. cuDNN's kernels for it are made for maps, and what it picks of them for thousands of channels on maps of a
few positions, as MobileNet has them on small images, differs from run to run, by twice the time of a step. These read
everything once, and leave out what falls outside of the map. Which is faster is measured per layer
(`outcore.fusion.program.autotune`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

if TYPE_CHECKING:
    from outcore.fusion.rules.convolution import MemberConvolution

_KINDS = (torch.float32, torch.bfloat16, torch.float16)


def is_depthwise(conv: MemberConvolution, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can do it: of ``[N, C, H, W]`` with channels last, by ``[C, 1, h, w]``."""
    return (
        x.is_cuda
        and conv.dims == 2
        and not conv.transposed
        and conv.dilation == (1, 1)
        and not isinstance(conv.padding, str)
        and x.shape[1] == weight.shape[0]
        and weight.shape[1] == 1
        and x.dtype in _KINDS
        and x.movedim(1, -1).is_contiguous()
    )


def depthwise(conv: MemberConvolution, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution, in autocast's precision."""
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    made: Tensor = _Depthwise.apply(x.to(low), weight.to(low), conv)  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias.to(low).view(-1, 1, 1)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: MemberConvolution) -> Tensor:
        assert not isinstance(conv.padding, str)
        ctx.conv = conv
        ctx.save_for_backward(x, weight)
        height, width = (
            (x.shape[2 + d] + 2 * conv.padding[d] - weight.shape[2 + d]) // conv.stride[d] + 1 for d in (0, 1)
        )
        if isinstance(x, FakeTensor):  # a dry run: only sizes count
            return x.new_empty(x.shape[0], height, width, x.shape[1]).movedim(-1, 1)
        from outcore.kernels.depthwise_conv import forward

        return forward(conv, x.movedim(1, -1), weight.flatten(1, 2).contiguous(), (height, width)).movedim(-1, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if isinstance(x, FakeTensor):
            return torch.empty_like(x), torch.empty_like(weight), None
        from outcore.kernels.depthwise_conv import input_gradient, weight_gradient

        rows, given = grad.movedim(1, -1).contiguous(), x.movedim(1, -1)
        own = weight.flatten(1, 2).contiguous()
        first = second = None
        if ctx.needs_input_grad[0]:
            first = input_gradient(ctx.conv, rows, own, (x.shape[2], x.shape[3])).movedim(-1, 1)
        if ctx.needs_input_grad[1]:
            second = weight_gradient(ctx.conv, given, rows, own).view_as(weight)
        return first, second, None
