"""Triton kernels of what follows a convolution: a bias per channel, a skip, ReLU; one pass over memory each way.

Backward lets the gradient through where the output is not at or below zero and sums it up per channel in the same pass.
Tensors are cut as for norms (`outcore.kernels.batch_norm_relu`), the sums of the pieces added up in the same order
every time. The skip may be a region of a larger tensor, so its pixels are found by their place: rows of the result are
counted over (sample, row, column) of the image.

What is not a number stays so, as in torch: `tl.maximum(x, 0)` is zero for it on a GPU, which would hide from training
that it has diverged.

Beside them, the sum of two tensors with ReLU: the end of a residual block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outcore.kernels.batch_norm_relu import added_up, pieces_of

# mypy: ignore-errors


@triton.jit
def _bias_rows(
    x, bias, channels, inner, blocks,
    ROUND: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(ACC)
    b = tl.load(bias + row % channels)
    y += (b.to(x.dtype.element_ty) if ROUND else b).to(ACC)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)
    tl.store(x + row * inner + place, y.to(x.dtype.element_ty), mask=place < inner)


@triton.jit
def _bias_columns(
    x, bias, skip, channels, rows, height, width, sn, sh, sw,
    SKIP: tl.constexpr, ROUND: tl.constexpr, RELU: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    b = tl.load(bias + c, mask=inside, other=0.0)
    b = (b.to(x.dtype.element_ty) if ROUND else b).to(ACC)[None, :]
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        y = tl.load(x + place, mask=mask, other=0.0).to(ACC) + b
        if SKIP:
            n = r // (height * width)
            rest = r - n * (height * width)
            h = rest // width
            pixel = n * sn + h * sh + (rest - h * width) * sw
            y += tl.load(skip + pixel[:, None] + c[None, :], mask=mask, other=0.0).to(ACC)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)
        tl.store(x + place, y.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _back_rows(
    grad, y, out, sums, channels, images, inner, pieces,
    RELU: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    total = tl.zeros([BLOCK], dtype=ACC)
    for i in range(BLOCKS):
        place = (piece * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        inside = place < inner
        g = tl.load(grad + row * inner + place, mask=inside, other=0.0)
        if RELU:
            g = tl.where(tl.load(y + row * inner + place, mask=inside, other=0.0) <= 0, 0.0, g)
            tl.store(out + row * inner + place, g, mask=inside)
        total += g.to(ACC)
    tl.store(sums + (c * images + row // channels) * pieces + piece, tl.sum(total, axis=0))


@triton.jit
def _back_columns(
    grad, y, out, sums, channels, rows,
    RELU: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        g = tl.load(grad + place, mask=mask, other=0.0)
        if RELU:
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


def biased(
    x: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor | None = None,
    *,
    relu: bool = True,
    rounded: bool = True,
) -> None:
    """Add a bias to every channel of a contiguous or channels-last tensor and a skip, then ReLU, in place.

    Args:
        x: with a skip, four-dimensional and channels-last.
        bias: of any type.
        skip: of the shape and type of `x`, the channels of a pixel side by side.
        relu: or the sum alone.
        rounded: whether the bias is rounded to the type of `x` first, as in torch's convolutions.
    """
    cut = pieces_of(x, last=skip is not None)
    given = {
        "ROUND": rounded,
        "RELU": relu,
        "ACC": tl.float64 if x.dtype is torch.float64 else tl.float32,
        **cut.written,
    }
    if cut.contiguous:
        _bias_rows[cut.writers](x, bias, cut.channels, cut.inner, cut.blocks, **given)
        return
    image = (0,) * 5 if skip is None else (*x.shape[-2:], skip.stride(0), skip.stride(2), skip.stride(3))
    added = x if skip is None else skip
    _bias_columns[cut.writers](x, bias, added, cut.channels, cut.count, *image, SKIP=skip is not None, **given)


def gradients(
    grad: torch.Tensor, y: torch.Tensor, kind: torch.dtype, *, relu: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of input (and of the skip, which is the same) and bias.

    Args:
        grad: of the output, laid out as it.
        y: the output, dense.
        kind: type of the bias.
        relu: whether there was one; the gradient of the input is that of the output otherwise, itself.
    """
    cut = pieces_of(y)
    double = y.dtype is torch.float64
    precision, acc = (torch.float64, tl.float64) if double else (torch.float32, tl.float32)
    out = torch.empty_like(y) if relu else grad
    sums = torch.empty(cut.plane, dtype=precision, device=y.device)
    if cut.contiguous:
        sizes = (cut.channels, cut.images, cut.inner, cut.each)
        _back_rows[cut.grid](grad, y, out, sums, *sizes, RELU=relu, ACC=acc, **cut.tile)
    else:
        _back_columns[cut.grid](grad, y, out, sums, cut.channels, cut.count, RELU=relu, ACC=acc, **cut.tile)
    of_bias = torch.empty(cut.channels, dtype=kind, device=y.device)
    _finish[cut.adders](sums, of_bias, cut.channels, cut.pieces, cut.across, cut.along, **cut.adding)
    return out, of_bias


# mypy: ignore-errors


_BLOCK = 4096


@triton.jit
def _rectified_sum(x, y, out, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.load(x + place, mask=inside, other=0.0).to(ACC) + tl.load(y + place, mask=inside, other=0.0).to(ACC)
    tl.store(out + place, tl.where(total <= 0, 0.0, total).to(out.dtype.element_ty), mask=inside)


def rectified_sum(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """ReLU of the sum of two dense tensors that lie alike in memory; `out` may be one of them."""
    acc = tl.float64 if x.dtype is torch.float64 else tl.float32
    count = x.numel()
    _rectified_sum[(triton.cdiv(count, _BLOCK),)](x, y, out, count, ACC=acc, BLOCK=_BLOCK)
