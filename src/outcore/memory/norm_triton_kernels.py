"""Triton kernels of batch norm with ReLU: statistics, normalising with them, sums for the gradients, gradients.

One pass over memory each. Every channel of every image is cut into pieces, so that one image of a few channels fills
the device too; the sums of pieces are added up in one more small step, always in the same order.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["gradient_sums", "input_gradient", "moments", "normalise"]

_BLOCK = 2048
_PIECE = 16 * _BLOCK
"""Elements of a channel that one program sums up."""
_COLUMNS = 64
"""Channels of a tile where the channels of a pixel lie side by side."""


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
def _columns(mean, invstd, weight, bias, c, inside):
    """Statistics and weights of some channels, as a row."""
    m = tl.load(mean + c, mask=inside, other=0.0)
    s = tl.load(invstd + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0).to(m.dtype)
    b = tl.load(bias + c, mask=inside, other=0.0).to(m.dtype)
    return m[None, :], s[None, :], w[None, :], b[None, :]


@triton.jit
def _channel_columns(
    x, out, mean, invstd, weight, bias, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program for some pixels and channels, where the channels of a pixel lie side by side."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = _columns(mean, invstd, weight, bias, c, inside)
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        tl.store(out + place, _rounded(v, m, s, w, b, ORDER, RELU).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _moments_of_rows(
    x, sums, squares, channels, images, inner, pieces,
    ACC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of one channel of one image, less the channel's first number, to [channels, images, pieces]."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    first = tl.load(x + c * inner).to(ACC)
    total = tl.zeros([BLOCK], dtype=ACC)
    square = tl.zeros([BLOCK], dtype=ACC)
    for i in range(BLOCKS):
        place = (piece * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(ACC)
        v = tl.where(place < inner, v - first, 0.0)
        total += v
        square += v * v
    to = (c * images + row // channels) * pieces + piece
    tl.store(sums + to, tl.sum(total, axis=0))
    tl.store(squares + to, tl.sum(square, axis=0))


@triton.jit
def _moments_of_columns(
    x, sums, squares, channels, rows,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same over some pixels of some channels, to [pieces, channels]."""
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    first = tl.load(x + c, mask=inside, other=0.0).to(ACC)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    square = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + r[:, None] * channels + c[None, :], mask=mask, other=0.0).to(ACC)
        v = tl.where(mask, v - first, 0.0)
        total += v
        square += v * v
    tl.store(sums + piece * channels + c, tl.sum(total, axis=0), mask=inside)
    tl.store(squares + piece * channels + c, tl.sum(square, axis=0), mask=inside)


@triton.jit
def _through(g, v, m, s, w, b, ORDER: tl.constexpr, RELU: tl.constexpr):
    """The gradient where ReLU lets it through."""
    if RELU:
        g = tl.where(_rounded(v, m, s, w, b, ORDER, False) > 0, g, 0.0)
    return g


@triton.jit
def _sums_of_rows(
    grad, x, mean, invstd, weight, bias, total, along, channels, images, inner, pieces,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
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
        g = _through(g, v, m, s, w, b, ORDER, RELU)
        all_ += g
        with_x += g * (v - m)
    to = (c * images + row // channels) * pieces + piece
    tl.store(total + to, tl.sum(all_, axis=0))
    tl.store(along + to, tl.sum(with_x, axis=0))


@triton.jit
def _sums_of_columns(
    grad, x, mean, invstd, weight, bias, total, along, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sums over some pixels of some channels, to [pieces, channels]."""
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = _columns(mean, invstd, weight, bias, c, inside)
    all_ = tl.zeros([ROWS, COLUMNS], dtype=m.dtype)
    with_x = tl.zeros([ROWS, COLUMNS], dtype=m.dtype)
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        g = tl.load(grad + place, mask=mask, other=0.0).to(m.dtype)
        g = _through(g, v, m, s, w, b, ORDER, RELU)
        all_ += g
        with_x += g * (v - m)
    tl.store(total + piece * channels + c, tl.sum(all_, axis=0), mask=inside)
    tl.store(along + piece * channels + c, tl.sum(with_x, axis=0), mask=inside)


@triton.jit
def _gradient_of_rows(
    grad, x, mean, invstd, weight, bias, total, along, out, channels, inner, blocks, count,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a piece of one channel of one image."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    c = row % channels
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
    w, b = w.to(m.dtype), b.to(m.dtype)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = tl.load(grad + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = _through(g, v, m, s, w, b, ORDER, RELU)
    back = (g - tl.load(total + c) / count - (v - m) * (s * s * tl.load(along + c) / count)) * (s * w)
    tl.store(out + row * inner + place, back.to(out.dtype.element_ty), mask=place < inner)


@triton.jit
def _gradient_of_columns(
    grad, x, mean, invstd, weight, bias, total, along, out, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradient of some pixels and channels, where the channels of a pixel lie side by side."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = _columns(mean, invstd, weight, bias, c, inside)
    shift = tl.load(total + c, mask=inside, other=0.0)[None, :] / rows
    slope = s * s * tl.load(along + c, mask=inside, other=0.0)[None, :] / rows
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        g = tl.load(grad + place, mask=mask, other=0.0).to(m.dtype)
        g = _through(g, v, m, s, w, b, ORDER, RELU)
        back = (g - shift - (v - m) * slope) * (s * w)
        tl.store(out + place, back.to(out.dtype.element_ty), mask=mask)


def _tiles(rows: int, channels: int, tiles: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs for a matrix of pixels and channels, and what each does."""
    columns = min(_COLUMNS, triton.next_power_of_2(channels))
    height = _BLOCK // columns
    grid = (triton.cdiv(rows, height * tiles), triton.cdiv(channels, columns))
    return grid, {"ROWS": height, "COLUMNS": columns, "TILES": tiles}


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of every channel, as float64."""
    channels, images, count = x.shape[1], x.shape[0], x.numel() // x.shape[1]
    precision = torch.float64 if x.dtype is torch.float64 else torch.float32
    acc = tl.float64 if x.dtype is torch.float64 else tl.float32
    if x.is_contiguous():
        inner = count // images
        block, blocks, pieces = _pieces(inner)
        sums = torch.empty((2, channels, images * pieces), dtype=precision, device=x.device)
        _moments_of_rows[(images * channels * pieces,)](
            x, sums[0], sums[1], channels, images, inner, pieces, ACC=acc, BLOCK=block, BLOCKS=blocks
        )
        total, squares = sums.sum(2, dtype=torch.float64)
    else:
        grid, tile = _tiles(count, channels, 16)
        sums = torch.empty((2, grid[0], channels), dtype=precision, device=x.device)
        _moments_of_columns[grid](x, sums[0], sums[1], channels, count, ACC=acc, **tile)
        total, squares = sums.sum(1, dtype=torch.float64)
    shift = total / count
    return shift + x[(0, slice(None), *(0,) * (x.dim() - 2))], (squares / count - shift * shift).clamp_min_(0)


def _pieces(inner: int) -> tuple[int, int, int]:
    """Elements at a time, times, and programs for one channel of one image."""
    block = min(_BLOCK, triton.next_power_of_2(max(1, inner)))
    blocks = max(1, min(_PIECE // block, triton.cdiv(inner, block)))
    return block, blocks, triton.cdiv(inner, block * blocks)


def gradient_sums(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    order: int,
    relu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per channel, the sum of the gradients that ReLU lets through, and of their products with the centred input."""
    channels, images = x.shape[1], x.shape[0]
    given = (grad, x, mean, invstd, weight, bias)
    if x.is_contiguous():
        inner = x.numel() // max(1, images * channels)
        block, blocks, pieces = _pieces(inner)
        sums = mean.new_empty((2, channels, images * pieces))
        _sums_of_rows[(images * channels * pieces,)](
            *given,
            sums[0],
            sums[1],
            channels,
            images,
            inner,
            pieces,
            ORDER=order,
            RELU=relu,
            BLOCK=block,
            BLOCKS=blocks,
        )
        return tuple(sums.sum(2))
    rows = x.numel() // max(1, channels)
    grid, tile = _tiles(rows, channels, 16)
    sums = mean.new_empty((2, grid[0], channels))
    _sums_of_columns[grid](*given, sums[0], sums[1], channels, rows, ORDER=order, RELU=relu, **tile)
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
    relu: bool,
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
        _gradient_of_rows[(x.shape[0] * channels * blocks,)](
            *given, inner, blocks, count, ORDER=order, RELU=relu, BLOCK=block
        )
    else:
        grid, tile = _tiles(count, channels, 4)
        _gradient_of_columns[grid](*given, count, ORDER=order, RELU=relu, **tile)
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
        grid, tile = _tiles(count // channels, channels, 4)
        _channel_columns[grid](*given, count // channels, ORDER=order, RELU=relu, **tile)
    return out
