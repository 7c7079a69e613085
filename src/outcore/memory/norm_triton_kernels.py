"""Triton kernels of batch norm with ReLU: normalising with given statistics, and the gradients, one pass each."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["gradient_sums", "input_gradient", "normalise"]

_BLOCK = 2048
_PIECE = 16 * _BLOCK
"""Elements of a channel that one program sums up."""
_ROWS, _COLUMNS = 32, 64
"""Pixels and channels of a tile where the channels of a pixel lie side by side."""
_TILES = 16
"""Tiles that one program sums up."""


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


@triton.jit
def _through(g, v, m, s, w, b, ORDER: tl.constexpr):
    """The gradient where ReLU lets it through."""
    return tl.where(_rounded(v, m, s, w, b, ORDER, False) > 0, g, 0.0)


@triton.jit
def _sums_of_rows(
    grad, x, mean, invstd, weight, bias, total, along, channels, images, inner, pieces,
    ORDER: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of one channel of one image, to [channels, images, pieces]."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    w, b = w.to(m.dtype), b.to(m.dtype)
    all_ = tl.zeros([BLOCK], dtype=m.dtype)
    with_x = tl.zeros([BLOCK], dtype=m.dtype)
    for i in range(BLOCKS):
        place = (piece * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
        g = tl.load(grad + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
        g = _through(g, v, m, s, w, b, ORDER)
        all_ += g
        with_x += g * (v - m)
    to = (c * images + row // channels) * pieces + piece
    tl.store(total + to, tl.sum(all_, axis=0))
    tl.store(along + to, tl.sum(with_x, axis=0))


@triton.jit
def _sums_of_columns(
    grad, x, mean, invstd, weight, bias, total, along, channels, rows,
    ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sums over some pixels of some channels, to [pieces, channels]."""
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m = tl.load(mean + c, mask=inside, other=0.0)
    s = tl.load(invstd + c, mask=inside, other=0.0)[None, :]
    w = tl.load(weight + c, mask=inside, other=0.0).to(m.dtype)[None, :]
    b = tl.load(bias + c, mask=inside, other=0.0).to(m.dtype)[None, :]
    all_ = tl.zeros([ROWS, COLUMNS], dtype=m.dtype)
    with_x = tl.zeros([ROWS, COLUMNS], dtype=m.dtype)
    m = m[None, :]
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        g = tl.load(grad + place, mask=mask, other=0.0).to(m.dtype)
        g = _through(g, v, m, s, w, b, ORDER)
        all_ += g
        with_x += g * (v - m)
    tl.store(total + piece * channels + c, tl.sum(all_, axis=0), mask=inside)
    tl.store(along + piece * channels + c, tl.sum(with_x, axis=0), mask=inside)


@triton.jit
def _gradient_of_rows(
    grad, x, mean, invstd, weight, bias, total, along, out, channels, inner, blocks, count,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a piece of one channel of one image."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    c = row % channels
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    w, b = w.to(m.dtype), b.to(m.dtype)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = tl.load(grad + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = _through(g, v, m, s, w, b, ORDER)
    back = (g - tl.load(total + c) / count - (v - m) * (s * s * tl.load(along + c) / count)) * (s * w)
    tl.store(out + row * inner + place, back.to(out.dtype.element_ty), mask=place < inner)


@triton.jit
def _gradient_of_columns(
    grad, x, mean, invstd, weight, bias, total, along, out, channels, elements, count,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a piece of memory in which the channels of a pixel lie side by side."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = (place % channels).to(tl.int32)
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    w, b = w.to(m.dtype), b.to(m.dtype)
    v = tl.load(x + place, mask=place < elements, other=0.0).to(m.dtype)
    g = tl.load(grad + place, mask=place < elements, other=0.0).to(m.dtype)
    g = _through(g, v, m, s, w, b, ORDER)
    back = (g - tl.load(total + c) / count - (v - m) * (s * s * tl.load(along + c) / count)) * (s * w)
    tl.store(out + place, back.to(out.dtype.element_ty), mask=place < elements)


def gradient_sums(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    order: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per channel, the sum of the gradients that ReLU lets through, and of their products with the centred input."""
    channels, images = x.shape[1], x.shape[0]
    given = (grad, x, mean, invstd, weight, bias)
    if x.is_contiguous():
        inner = x.numel() // max(1, images * channels)
        block = min(_BLOCK, triton.next_power_of_2(max(1, inner)))
        blocks = max(1, min(_PIECE // block, triton.cdiv(inner, block)))
        pieces = triton.cdiv(inner, block * blocks)
        sums = mean.new_empty((2, channels, images * pieces))
        _sums_of_rows[(images * channels * pieces,)](
            *given, sums[0], sums[1], channels, images, inner, pieces, ORDER=order, BLOCK=block, BLOCKS=blocks
        )
        return tuple(sums.sum(2))
    rows = x.numel() // max(1, channels)
    pieces = triton.cdiv(rows, _ROWS * _TILES)
    sums = mean.new_empty((2, pieces, channels))
    _sums_of_columns[(pieces, triton.cdiv(channels, _COLUMNS))](
        *given, sums[0], sums[1], channels, rows, ORDER=order, ROWS=_ROWS, COLUMNS=_COLUMNS, TILES=_TILES
    )
    return tuple(sums.sum(1))


def input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    total: torch.Tensor,
    along: torch.Tensor,
    order: int,
) -> torch.Tensor:
    """The gradient of the norm's input."""
    out = torch.empty_like(x)
    channels, elements = x.shape[1], x.numel()
    given = (grad, x, mean, invstd, weight, bias, total, along, out, channels)
    count = elements // channels
    if x.is_contiguous():
        inner = elements // (x.shape[0] * channels)
        block = min(_BLOCK, triton.next_power_of_2(inner))
        blocks = triton.cdiv(inner, block)
        _gradient_of_rows[(x.shape[0] * channels * blocks,)](*given, inner, blocks, count, ORDER=order, BLOCK=block)
    else:
        _gradient_of_columns[(triton.cdiv(elements, _BLOCK),)](*given, elements, count, ORDER=order, BLOCK=_BLOCK)
    return out


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
