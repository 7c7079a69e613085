"""Triton kernels of a max pool over images that keeps one byte per output: where in its window the maximum lies.

Forward writes the maxima and their positions in one pass; backward goes over the input, and every pixel adds up what
the windows it lies in give it, row by row, in the order in which torch does. No index of eight bytes is ever written,
and backward needs nothing of the input but its shape.

The first of equal maxima counts, and the last of what is no number, as in torch. Where a window holds nothing but minus
infinity, torch gives its gradient to the window's first pixel; where channels are last it names the image's first
pixel, and no pixel gets the gradient of a window in which that is not (`outcore.kernels.pool_window.NOWHERE`).

Where channels are contiguous, a program has a run of pixels; where those of a pixel lie side by side (channels last), a
tile of pixels and channels, so that coordinates are divided out once per pixel.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outcore.kernels.pool_window import NOWHERE, PoolWindow

_BLOCK = 1024
"""Numbers that a program has."""
_CHANNELS = 64
"""Of these side by side, at most."""


@triton.jit
def _place(height, width, BLOCK: tl.constexpr):
    """The image that a program begins in, and of its pixels: places, images from there, rows and columns."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    period = height * width
    local = (start % period).to(tl.int32) + tl.arange(0, BLOCK)
    over = local // period
    local = local - over * period
    y = local // width
    return start // period, start + tl.arange(0, BLOCK), over.to(tl.int64), y, local - y * width


@triton.jit
def _pool(
    x, out, positions, pixels, channels, height, width, image_height, image_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, NONE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, place, over, row, column = _place(height, width, BLOCK)
    top, left = row * SH - PH, column * SW - PW
    code = tl.maximum(-top + DH - 1, 0) // DH * KW + tl.maximum(-left + DW - 1, 0) // DW
    if NONE:
        code = tl.where((top > 0) | (left > 0) | (top % DH != 0) | (left % DW != 0), NONE, code)
    base = (image + over) * image_height * image_width
    inside = place < pixels
    if CHANNELS == 1:
        channel, best = 0, tl.full([BLOCK], float("-inf"), x.dtype.element_ty)
    else:
        channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
        best = tl.full([BLOCK, CHANNELS], float("-inf"), x.dtype.element_ty)
        code = tl.broadcast_to(code[:, None], [BLOCK, CHANNELS])
        inside = inside[:, None] & (channel < channels)
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            iy, ix = top + ky * DH, left + kx * DW
            there = (iy >= 0) & (iy < image_height) & (ix >= 0) & (ix < image_width)
            at = (base + iy * image_width + ix) * channels
            if CHANNELS > 1:
                there, at = there[:, None], at[:, None] + channel
            there = there & inside
            value = tl.load(x + at, mask=there, other=float("-inf"))
            better = there & ((value > best) | (value != value))
            best = tl.where(better, value, best)
            code = tl.where(better, ky * KW + kx, code)
    target = place * channels
    if CHANNELS > 1:
        target = target[:, None] + channel
    tl.store(out + target, best, mask=inside)
    tl.store(positions + target, code.to(tl.uint8), mask=inside)


@triton.jit
def _unpool(
    gradient, positions, out, pixels, channels, height, width, pooled_height, pooled_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, NH: tl.constexpr, NW: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, place, over, row, column = _place(height, width, BLOCK)
    base = (image + over) * pooled_height * pooled_width
    y, x = row + PH, column + PW
    first_y = tl.maximum(y - (KH - 1) * DH + SH - 1, 0) // SH
    first_x = tl.maximum(x - (KW - 1) * DW + SW - 1, 0) // SW
    inside = place < pixels
    if CHANNELS == 1:
        channel, total = 0, tl.zeros([BLOCK], SUM)
    else:
        channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
        total = tl.zeros([BLOCK, CHANNELS], SUM)
        inside = inside[:, None] & (channel < channels)
    for j in tl.static_range(NH):
        for i in tl.static_range(NW):
            py, px = first_y + j, first_x + i
            ky, kx = y - py * SH, x - px * SW
            there = (ky >= 0) & (kx >= 0) & (py < pooled_height) & (px < pooled_width)
            if DH * DW > 1:
                there = there & (ky % DH == 0) & (kx % DW == 0)
            at, wanted = (base + py * pooled_width + px) * channels, (ky // DH) * KW + kx // DW
            if CHANNELS > 1:
                there, at, wanted = there[:, None], at[:, None] + channel, wanted[:, None]
            there = there & inside
            code = tl.load(positions + at, mask=there, other=0).to(tl.int32)
            hit = there & (code == wanted)
            value = tl.load(gradient + at, mask=hit, other=0.0).to(SUM)
            total = tl.where(hit, total + value, total)
    target = place * channels
    if CHANNELS > 1:
        target = target[:, None] + channel
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


def pool(x: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, window: PoolWindow, *, last: bool) -> None:
    """Write the maximum of every window, and where in it that lies; channels of all three are last, or of none."""
    if out.numel():
        grid, pixels, channels, tile = _tiles(out, last=last)
        _pool[grid](
            x, out, positions, pixels, channels, *out.shape[-2:], *window.image, **_geometry(window),
            NONE=NOWHERE if last else 0, **tile,
        )  # fmt: skip


def unpool(
    gradient: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, window: PoolWindow, *, last: bool
) -> None:
    """Write the gradient of the input; channels of all three are last, or of none."""
    reach = [-(-((k - 1) * d + 1) // s) for k, d, s in zip(window.kernel, window.dilation, window.stride, strict=True)]
    if out.numel():
        grid, pixels, channels, tile = _tiles(out, last=last)
        kind = tl.float64 if out.dtype is torch.float64 else tl.float32
        _unpool[grid](
            gradient, positions, out, pixels, channels, *out.shape[-2:], *gradient.shape[-2:], **_geometry(window),
            NH=reach[0], NW=reach[1], SUM=kind, **tile,
        )  # fmt: skip


def _tiles(tensor: torch.Tensor, *, last: bool) -> tuple[tuple[int, ...], int, int, dict[str, int]]:
    """How many programs, pixels, channels that lie side by side, and what a program has of both.

    An image of one pixel lies both ways, and the one it is pooled from in one only, so a tensor does not tell.
    """
    channels = tensor.shape[1] if last else 1
    pixels = tensor.numel() // channels
    side = 1 if channels == 1 else min(_CHANNELS, triton.next_power_of_2(channels))
    block = _BLOCK // side
    grid = (triton.cdiv(pixels, block), triton.cdiv(channels, side))
    return grid, pixels, channels, {"BLOCK": block, "CHANNELS": side}


def _geometry(window: PoolWindow) -> dict[str, int]:
    pairs = {"K": window.kernel, "S": window.stride, "P": window.padding, "D": window.dilation}
    return {f"{name}{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}
