"""Triton kernels of depthwise convolutions of all members, forward and backward (`rules.depthwise`).

Tensors lie as ``[samples, height, width, channels]``, the channels of all members side by side, so a tile of positions
by channels is read in whole lines. A tap of the window that no output position can reach inside the map is left out
when the kernel is compiled: of a 5x5 window on a 1x1 map one tap is left. Sums are in single precision.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 8, 128
_PROGRAMS = 1024
"""Programs that fill a GPU; sums over positions are split until there are about so many."""


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width"])
def _forward(
    x, weight, y, rows, channels, height, width, out_height, out_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (r < rows) & (c < channels)
    column, line = r % out_width, (r // out_width) % out_height
    sample = (r // (out_width * out_height)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for i in tl.static_range(TOP, BOTTOM):
        for j in tl.static_range(LEFT, RIGHT):
            h, w = line * SH - PH + i, column * SW - PW + j
            there = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            v = tl.load(x + ((sample * height + h) * width + w) * channels + c, mask=there, other=0.0)
            k = tl.load(weight + c * (KH * KW) + i * KW + j, mask=c < channels, other=0.0)
            total += v.to(tl.float32) * k.to(tl.float32)
    tl.store(y + r.to(tl.int64) * channels + c, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "height", "width", "out_height", "out_width"])
def _input_gradient(
    grad, weight, out, rows, channels, height, width, out_height, out_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (r < rows) & (c < channels)
    column, line, sample = r % width, (r // width) % height, (r // (width * height)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for i in tl.static_range(TOP, BOTTOM):
        for j in tl.static_range(LEFT, RIGHT):
            a, b = line + PH - i, column + PW - j
            h, w = a // SH, b // SW
            there = inside & (a >= 0) & (b >= 0) & (a % SH == 0) & (b % SW == 0) & (h < out_height) & (w < out_width)
            g = tl.load(grad + ((sample * out_height + h) * out_width + w) * channels + c, mask=there, other=0.0)
            k = tl.load(weight + c * (KH * KW) + i * KW + j, mask=c < channels, other=0.0)
            total += g.to(tl.float32) * k.to(tl.float32)
    tl.store(out + r.to(tl.int64) * channels + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "share", "height", "width", "out_height", "out_width"])
def _weight_gradient(
    x, grad, sums, rows, share, channels, height, width, out_height, out_width,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TOP: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tap, a share of the positions."""
    c = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    i = TOP + tl.program_id(1) // (RIGHT - LEFT)
    j = LEFT + tl.program_id(1) % (RIGHT - LEFT)
    begin = tl.program_id(2) * share
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, share, ROWS):
        r = (begin + start + tl.arange(0, ROWS))[:, None]
        inside = (r < rows) & (start + tl.arange(0, ROWS)[:, None] < share) & (c < channels)
        column, line = r % out_width, (r // out_width) % out_height
        sample = (r // (out_width * out_height)).to(tl.int64)
        h, w = line * SH - PH + i, column * SW - PW + j
        there = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        v = tl.load(x + ((sample * height + h) * width + w) * channels + c, mask=there, other=0.0)
        g = tl.load(grad + r.to(tl.int64) * channels + c, mask=there, other=0.0)
        total += v.to(tl.float32) * g.to(tl.float32)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    to = (tl.program_id(2).to(tl.int64) * channels + c) * (KH * KW) + i * KW + j
    tl.store(sums + to, tl.sum(total, axis=0), mask=c < channels)


def _taps(kernel, stride, padding, size, out_size):
    """First and last of the taps that meet the map, of one dimension."""
    met = [k for k in range(kernel) if any(0 <= o * stride - padding + k < size for o in range(out_size))]
    return (met[0], met[-1] + 1) if met else (0, 0)


def _settings(conv, kernel, size, out_size):
    (kh, kw), (sh, sw), (ph, pw) = kernel, conv.stride, conv.padding
    (top, bottom), (left, right) = (
        _taps(kernel[d], conv.stride[d], conv.padding[d], size[d], out_size[d]) for d in (0, 1)
    )
    return {
        "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw,
        "TOP": top, "BOTTOM": bottom, "LEFT": left, "RIGHT": right, "ROWS": _ROWS, "COLUMNS": _COLUMNS,
    }  # fmt: skip


def forward(conv, x: torch.Tensor, weight: torch.Tensor, out_size: tuple[int, int]) -> torch.Tensor:
    """Of ``[samples, height, width, channels]`` and ``[channels, height, width]``."""
    samples, height, width, channels = x.shape
    y = torch.empty(samples, *out_size, channels, dtype=x.dtype, device=x.device)
    rows = samples * out_size[0] * out_size[1]
    _forward[triton.cdiv(rows, _ROWS), triton.cdiv(channels, _COLUMNS)](
        x, weight, y, rows, channels, height, width, *out_size,
        **_settings(conv, weight.shape[1:], (height, width), out_size),
    )  # fmt: skip
    return y


def input_gradient(conv, grad: torch.Tensor, weight: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The gradient of the input, which has this size."""
    samples, out_height, out_width, channels = grad.shape
    out = torch.empty(samples, *size, channels, dtype=grad.dtype, device=grad.device)
    rows = samples * size[0] * size[1]
    _input_gradient[triton.cdiv(rows, _ROWS), triton.cdiv(channels, _COLUMNS)](
        grad, weight, out, rows, channels, *size, out_height, out_width,
        **_settings(conv, weight.shape[1:], size, (out_height, out_width)),
    )  # fmt: skip
    return out


def weight_gradient(conv, x: torch.Tensor, grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights, ``[channels, height, width]`` as `like`; summed in the same order every time."""
    samples, height, width, channels = x.shape
    out_size = tuple(grad.shape[1:3])
    rows, settings = samples * out_size[0] * out_size[1], _settings(conv, like.shape[1:], (height, width), out_size)
    taps = (settings["BOTTOM"] - settings["TOP"]) * (settings["RIGHT"] - settings["LEFT"])
    blocks = triton.cdiv(channels, _COLUMNS)
    shares = max(1, min(triton.cdiv(rows, 4 * _ROWS), _PROGRAMS // max(1, blocks * taps)))
    share = triton.cdiv(triton.cdiv(rows, shares), _ROWS) * _ROWS
    shares = triton.cdiv(rows, share)
    make = torch.empty if taps == like.shape[1] * like.shape[2] else torch.zeros
    sums = make(shares, *like.shape, dtype=torch.float32, device=x.device)
    if taps:
        _weight_gradient[blocks, taps, shares](
            x, grad, sums, rows, share, channels, height, width, *out_size, **settings
        )  # fmt: skip
    return (sums[0] if shares == 1 else sums.sum(0)).to(like.dtype)
