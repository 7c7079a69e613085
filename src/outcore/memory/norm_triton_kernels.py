"""A Triton kernel that normalises with given statistics, and applies ReLU, in one pass over memory."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["normalise"]

_BLOCK = 2048


@triton.jit
def _rounded(v, m, s, w, b, ORDER: tl.constexpr, RELU: tl.constexpr):
    if ORDER == 0:
        y = w * (v - m) * s + b
    elif ORDER == 1:
        y = (v - m) * s * w + b
    elif ORDER == 2:
        y = v * (s * w) + (b - m * (s * w))
    else:
        y = (v - m) * (s * w) + b
    if RELU:
        y = tl.where(y <= 0, 0.0, y)
    return y


@triton.jit
def _channel_rows(
    x, out, mean, invstd, weight, bias, channels, inner, blocks,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a piece of one channel of one image."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    c = row % channels
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    y = _rounded(v, m, s, w.to(m.dtype), b.to(m.dtype), ORDER, RELU)
    tl.store(out + row * inner + place, y.to(out.dtype.element_ty), mask=place < inner)


@triton.jit
def _channels_last(
    x, out, mean, invstd, weight, bias, channels, count,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for a piece of memory in which the channels of a pixel lie side by side."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = (place % channels).to(tl.int32)
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    v = tl.load(x + place, mask=place < count, other=0.0).to(m.dtype)
    y = _rounded(v, m, s, w.to(m.dtype), b.to(m.dtype), ORDER, RELU)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=place < count)


def normalise(
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    order: int,
    relu: bool,
) -> torch.Tensor:
    """Normalise a contiguous or channels-last tensor."""
    out = torch.empty_like(x)
    channels, count = x.shape[1], x.numel()
    if not count:
        return out
    given = (x, out, mean, invstd, weight, bias, channels)
    if x.is_contiguous():
        inner = count // (x.shape[0] * channels)
        block = min(_BLOCK, triton.next_power_of_2(inner))
        blocks = triton.cdiv(inner, block)
        _channel_rows[(x.shape[0] * channels * blocks,)](*given, inner, blocks, ORDER=order, RELU=relu, BLOCK=block)
    else:
        _channels_last[(triton.cdiv(count, _BLOCK),)](*given, count, ORDER=order, RELU=relu, BLOCK=_BLOCK)
    return out
