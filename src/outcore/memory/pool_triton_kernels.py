"""Triton kernels of a max pool over images that keeps one byte per output: where in its window the maximum lies.

Forward writes the maxima and their positions in one pass; backward goes over the input, and every pixel adds up what
the windows it lies in give it, row by row, in the order in which torch does. No index of eight bytes is ever written,
and backward needs nothing of the input but its shape.

The first of equal maxima counts, and the last of what is no number, as in torch.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from outcore.memory.windows import Window

__all__ = ["pool", "unpool"]

_BLOCK = 1024


@triton.jit
def _place(inner, height, width, BLOCK: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Places in memory, the image (of one channel, or of all) each lies in, its channel there, row and column."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    period = inner * height * width
    local = (start % period).to(tl.int32) + tl.arange(0, BLOCK)
    over = local // period
    local = local - over * period
    pixel = local if CONTIGUOUS else local // inner
    y = pixel // width
    return start + tl.arange(0, BLOCK), start // period + over, local - pixel * inner, y, pixel - y * width


@triton.jit
def _pool(
    x, out, positions, count, inner, height, width, image_height, image_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, image, channel, row, column = _place(inner, height, width, BLOCK, CONTIGUOUS)
    base = x + image * image_height * image_width * inner + channel
    top, left = row * SH - PH, column * SW - PW
    first_y, first_x = tl.maximum(-top + DH - 1, 0) // DH, tl.maximum(-left + DW - 1, 0) // DW
    code = first_y * KW + first_x
    best = tl.full([BLOCK], float("-inf"), x.dtype.element_ty)
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            iy, ix = top + ky * DH, left + kx * DW
            there = (iy >= 0) & (iy < image_height) & (ix >= 0) & (ix < image_width) & (place < count)
            value = tl.load(base + (iy * image_width + ix) * inner, mask=there, other=float("-inf"))
            better = there & ((value > best) | (value != value))
            best = tl.where(better, value, best)
            code = tl.where(better, ky * KW + kx, code)
    tl.store(out + place, best, mask=place < count)
    tl.store(positions + place, code.to(tl.uint8), mask=place < count)


@triton.jit
def _unpool(
    gradient, positions, out, count, inner, height, width, pooled_height, pooled_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, SUM: tl.constexpr,
    CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, image, channel, row, column = _place(inner, height, width, BLOCK, CONTIGUOUS)
    base = image * pooled_height * pooled_width * inner + channel
    y, x = row + PH, column + PW
    first_y = tl.maximum(y - (KH - 1) * DH + SH - 1, 0) // SH
    first_x = tl.maximum(x - (KW - 1) * DW + SW - 1, 0) // SW
    total = tl.zeros([BLOCK], SUM)
    for j in tl.static_range(NH):
        for i in tl.static_range(NW):
            py, px = first_y + j, first_x + i
            ky, kx = y - py * SH, x - px * SW
            there = (ky >= 0) & (kx >= 0) & (py < pooled_height) & (px < pooled_width) & (place < count)
            if DH * DW > 1:
                there = there & (ky % DH == 0) & (kx % DW == 0)
            at = base + (py * pooled_width + px) * inner
            code = tl.load(positions + at, mask=there, other=0).to(tl.int32)
            hit = there & (code == (ky // DH) * KW + kx // DW)
            value = tl.load(gradient + at, mask=hit, other=0.0).to(SUM)
            total = tl.where(hit, total + value, total)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def pool(x: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, window: Window) -> None:
    """Write the maximum of every window, and where in it that lies."""
    if count := out.numel():
        _pool[(triton.cdiv(count, _BLOCK),)](
            x, out, positions, count, _inner(out), *out.shape[-2:], *window.image, **_geometry(window),
            CONTIGUOUS=out.is_contiguous(), BLOCK=_BLOCK,
        )  # fmt: skip


def unpool(gradient: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, window: Window) -> None:
    """Write the gradient of the input."""
    reach = [-(-((k - 1) * d + 1) // s) for k, d, s in zip(window.kernel, window.dilation, window.stride, strict=True)]
    if count := out.numel():
        _unpool[(triton.cdiv(count, _BLOCK),)](
            gradient, positions, out, count, _inner(out), *out.shape[-2:], *gradient.shape[-2:], **_geometry(window),
            NH=reach[0], NW=reach[1], SUM=tl.float64 if out.dtype is torch.float64 else tl.float32,
            CONTIGUOUS=out.is_contiguous(), BLOCK=_BLOCK,
        )  # fmt: skip


def _inner(tensor: torch.Tensor) -> int:
    """Channels that lie side by side."""
    return 1 if tensor.is_contiguous() else tensor.shape[1]


def _geometry(window: Window) -> dict[str, int]:
    pairs = {"K": window.kernel, "S": window.stride, "P": window.padding, "D": window.dilation}
    return {f"{name}{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}
