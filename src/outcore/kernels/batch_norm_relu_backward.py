"""Triton kernels of batch norm with ReLU, backward: two sums per channel, then the gradient of the input.

One pass over memory each, cut as in forward (`outcore.kernels.batch_norm_relu`). Where ReLU lets the gradient through
is found from the norm's input, rounded in the order of forward.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outcore.kernels.batch_norm_relu import added_up, columns_of, pieces_of, rounded, row_of


@triton.jit
def _through(g, v, m, s, w, b, ORDER: tl.constexpr, RELU: tl.constexpr):
    """The gradient where ReLU lets it through."""
    if RELU:
        g = tl.where(rounded(v, m, s, w, b, ORDER, False) > 0, g, 0.0)
    return g


@triton.jit
def _sum_rows(
    grad, x, mean, invstd, weight, bias, sums, plane, channels, images, inner, pieces,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of a piece, the sum of the gradients and of their products with the centred input."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    m, s, w, b = tl.load(mean + c), tl.load(invstd + c), tl.load(weight + c), tl.load(bias + c)
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
    tl.store(sums + to, tl.sum(all_, axis=0))
    tl.store(sums + plane + to, tl.sum(with_x, axis=0))


@triton.jit
def _sum_columns(
    grad, x, mean, invstd, weight, bias, sums, plane, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES,
):  # fmt: skip
    """The same for a tile."""
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = columns_of(mean, invstd, weight, bias, c, inside)
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
    tl.store(sums + piece * channels + c, tl.sum(all_, axis=0), mask=inside)
    tl.store(sums + plane + piece * channels + c, tl.sum(with_x, axis=0), mask=inside)


@triton.jit
def _finish(
    sums, plane, invstd, shift, slope, of_weight, of_bias, channels, pieces, across, along, count,
    PIECES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Per channel: the gradients of weight and bias, and what the gradient of the input needs of the sums."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    total = added_up(sums, c, inside, channels, pieces, across, along, PIECES, CHANNELS)
    with_x = added_up(sums + plane, c, inside, channels, pieces, across, along, PIECES, CHANNELS)
    s = tl.load(invstd + c, mask=inside, other=0.0).to(tl.float64)
    kind = shift.dtype.element_ty
    tl.store(shift + c, (total / count).to(kind), mask=inside)
    tl.store(slope + c, (s * s * with_x / count).to(kind), mask=inside)
    tl.store(of_weight + c, (with_x * s).to(kind).to(of_weight.dtype.element_ty), mask=inside)
    tl.store(of_bias + c, total.to(kind).to(of_bias.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_of_rows(
    grad, x, mean, invstd, weight, bias, shift, slope, out, channels, inner, blocks,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, c, place, m, s, w, b = row_of(mean, invstd, weight, bias, channels, blocks, BLOCK)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = tl.load(grad + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    g = _through(g, v, m, s, w, b, ORDER, RELU)
    back = (g - tl.load(shift + c) - (v - m) * tl.load(slope + c)) * (s * w)
    tl.store(out + row * inner + place, back.to(out.dtype.element_ty), mask=place < inner)


@triton.jit
def _gradient_of_columns(
    grad, x, mean, invstd, weight, bias, shift, slope, out, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = columns_of(mean, invstd, weight, bias, c, inside)
    moved = tl.load(shift + c, mask=inside, other=0.0)[None, :]
    tilted = tl.load(slope + c, mask=inside, other=0.0)[None, :]
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        g = tl.load(grad + place, mask=mask, other=0.0).to(m.dtype)
        g = _through(g, v, m, s, w, b, ORDER, RELU)
        back = (g - moved - (v - m) * tilted) * (s * w)
        tl.store(out + place, back.to(out.dtype.element_ty), mask=mask)


def gradients(
    grad: torch.Tensor, x: torch.Tensor, found: torch.Tensor, kind: torch.dtype, order: int, relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, weight and bias.

    Args:
        grad: of the output, laid out as the input.
        x: the input, dense.
        found: mean, inverse deviation, weight and bias of every channel, as forward has found them.
        kind: type of the weights.
        order: in which forward rounds.
        relu: whether ReLU was part of it.
    """
    cut = pieces_of(x)
    statistics = found.view(4, cut.channels).unbind(0)
    sums = torch.empty(2 * cut.plane, dtype=found.dtype, device=x.device)
    given = (grad, x, *statistics)
    if cut.contiguous:
        sizes = (cut.channels, cut.images, cut.inner, cut.each)
        _sum_rows[cut.grid](*given, sums, cut.plane, *sizes, ORDER=order, RELU=relu, **cut.tile)
    else:
        _sum_columns[cut.grid](*given, sums, cut.plane, cut.channels, cut.count, ORDER=order, RELU=relu, **cut.tile)
    shift, slope = torch.empty((2, cut.channels), dtype=found.dtype, device=x.device).unbind(0)
    of_weight = torch.empty(cut.channels, dtype=kind, device=x.device)
    of_bias = torch.empty_like(of_weight)
    _finish[cut.adders](
        sums, cut.plane, statistics[1], shift, slope, of_weight, of_bias,
        cut.channels, cut.pieces, cut.across, cut.along, cut.count, **cut.adding,
    )  # fmt: skip
    out = torch.empty_like(x)
    given = (*given, shift, slope, out, cut.channels)
    if cut.contiguous:
        _gradient_of_rows[cut.writers](*given, cut.inner, cut.blocks, ORDER=order, RELU=relu, **cut.written)
    else:
        _gradient_of_columns[cut.writers](*given, cut.count, ORDER=order, RELU=relu, **cut.written)
    return out, of_weight, of_bias
