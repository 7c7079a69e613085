"""Triton kernels of a bias per channel with ReLU: one pass over memory each way.

Backward lets the gradient through where the output is above zero and sums it up per channel in the same pass. Tensors
are cut as for norms (`outcore.kernels.batch_norm_relu`), the sums of the pieces added up in the same order every time.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outcore.kernels.batch_norm_relu import added_up, pieces_of

__all__ = ["biased", "gradients"]


@triton.jit
def _rectified(v, b):
    y = v + b
    return tl.where(y <= 0, 0.0, y)


@triton.jit
def _bias_rows(x, bias, channels, inner, blocks, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(bias + row % channels).to(x.dtype.element_ty).to(ACC)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(ACC)
    tl.store(x + row * inner + place, _rectified(v, b).to(x.dtype.element_ty), mask=place < inner)


@triton.jit
def _bias_columns(
    x, bias, channels, rows, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    b = tl.load(bias + c, mask=inside, other=0.0).to(x.dtype.element_ty).to(ACC)[None, :]
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(ACC)
        tl.store(x + place, _rectified(v, b).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _back_rows(
    grad, y, out, sums, channels, images, inner, pieces, ACC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    total = tl.zeros([BLOCK], dtype=ACC)
    for i in range(BLOCKS):
        place = (piece * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        inside = place < inner
        g = tl.load(grad + row * inner + place, mask=inside, other=0.0)
        g = tl.where(tl.load(y + row * inner + place, mask=inside, other=0.0) <= 0, 0.0, g)
        tl.store(out + row * inner + place, g, mask=inside)
        total += g.to(ACC)
    tl.store(sums + (c * images + row // channels) * pieces + piece, tl.sum(total, axis=0))


@triton.jit
def _back_columns(
    grad, y, out, sums, channels, rows, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES
):
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        g = tl.load(grad + place, mask=mask, other=0.0)
        g = tl.where(tl.load(y + place, mask=mask, other=0.0) <= 0, 0.0, g)
        tl.store(out + place, g, mask=mask)
        total += g.to(ACC)
    tl.store(sums + piece * channels + c, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _finish(sums, of_bias, channels, pieces, across, along, PIECES: tl.constexpr, CHANNELS: tl.constexpr):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    total = added_up(sums, c, inside, channels, pieces, across, along, PIECES, CHANNELS)
    tl.store(of_bias + c, total.to(of_bias.dtype.element_ty), mask=inside)


def biased(x: torch.Tensor, bias: torch.Tensor) -> None:
    """Add a bias to every channel of a contiguous or channels-last tensor, then ReLU, in place."""
    cut = pieces_of(x)
    acc = tl.float64 if x.dtype is torch.float64 else tl.float32
    if cut.contiguous:
        _bias_rows[cut.writers](x, bias, cut.channels, cut.inner, cut.blocks, ACC=acc, **cut.written)
    else:
        _bias_columns[cut.writers](x, bias, cut.channels, cut.count, ACC=acc, **cut.written)


def gradients(grad: torch.Tensor, y: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of input and bias.

    Args:
        grad: of the output, laid out as it.
        y: the output, dense.
        kind: type of the bias.
    """
    cut = pieces_of(y)
    double = y.dtype is torch.float64
    precision, acc = (torch.float64, tl.float64) if double else (torch.float32, tl.float32)
    out, sums = torch.empty_like(y), torch.empty(cut.plane, dtype=precision, device=y.device)
    if cut.contiguous:
        sizes = (cut.channels, cut.images, cut.inner, cut.each)
        _back_rows[cut.grid](grad, y, out, sums, *sizes, ACC=acc, **cut.tile)
    else:
        _back_columns[cut.grid](grad, y, out, sums, cut.channels, cut.count, ACC=acc, **cut.tile)
    of_bias = torch.empty(cut.channels, dtype=kind, device=y.device)
    _finish[cut.adders](sums, of_bias, cut.channels, cut.pieces, cut.across, cut.along, **cut.adding)
    return out, of_bias
