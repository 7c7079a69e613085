"""Triton kernels of a batch norm whose largest values along the positions are all that is wanted (`rules.norm_max`).

A tensor lies as ``[samples, positions, channels]``. One pass finds, for every sample and channel, the sums that the
statistics follow from and the largest and smallest numbers with their places; one pass writes the gradient.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 16, 64
_TILES = 8
"""Tiles that one program of `spread` writes."""


@triton.jit
def _scan(
    x, sums, extremes, places, plane, channels, length,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums and sums of squares less the channel's first number, then the largest and the smallest with their places."""
    sample = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    first = tl.load(x + c, mask=inside, other=0.0).to(ACC)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    square = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    top = tl.full([ROWS, COLUMNS], float("-inf"), ACC)
    low = tl.full([ROWS, COLUMNS], float("inf"), ACC)
    top_at = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    low_at = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for start in range(0, length, ROWS):
        p = start + tl.arange(0, ROWS)[:, None]
        mask = (p < length) & inside[None, :]
        v = tl.load(x + (sample * length + p) * channels + c[None, :], mask=mask, other=0.0).to(ACC)
        less = tl.where(mask, v - first, 0.0)
        total += less
        square += less * less
        up, down = mask & (v > top), mask & (v < low)
        top, top_at = tl.where(up, v, top), tl.where(up, p, top_at)
        low, low_at = tl.where(down, v, low), tl.where(down, p, low_at)
    to = sample * channels + c
    tl.store(sums + to, tl.sum(total, axis=0), mask=inside)
    tl.store(sums + plane + to, tl.sum(square, axis=0), mask=inside)
    most, least = tl.max(top, axis=0), tl.min(low, axis=0)
    tl.store(extremes + to, most, mask=inside)
    tl.store(extremes + plane + to, least, mask=inside)
    tl.store(places + to, tl.min(tl.where(top == most[None, :], top_at, length), axis=0), mask=inside)
    tl.store(places + plane + to, tl.min(tl.where(low == least[None, :], low_at, length), axis=0), mask=inside)


@triton.jit
def _spread(
    x, grad, places, mean, factor, shift, slope, out, channels, length, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    begin = (tl.program_id(0) % blocks) * ROWS * TILES
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m = tl.load(mean + c, mask=inside, other=0.0)[None, :]
    f = tl.load(factor + c, mask=inside, other=0.0)[None, :]
    moved = tl.load(shift + c, mask=inside, other=0.0)[None, :]
    tilted = tl.load(slope + c, mask=inside, other=0.0)[None, :]
    g = tl.load(grad + sample * channels + c, mask=inside, other=0.0)[None, :]
    at = tl.load(places + sample * channels + c, mask=inside, other=-1)[None, :]
    for i in range(TILES):
        p = begin + i * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (p < length) & inside[None, :]
        to = (sample * length + p) * channels + c[None, :]
        v = tl.load(x + to, mask=mask, other=0.0).to(m.dtype)
        back = (tl.where(p == at, g, 0.0) - moved - (v - m) * tilted) * f
        tl.store(out + to, back.to(out.dtype.element_ty), mask=mask)


def scan(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ``[samples, positions, channels]``: two sums, the largest and smallest, and their places, per sample."""
    samples, length, channels = x.shape
    double = x.dtype is torch.float64
    sums = torch.empty(2, samples, channels, dtype=torch.float64 if double else torch.float32, device=x.device)
    extremes = torch.empty_like(sums)
    places = torch.empty(2, samples, channels, dtype=torch.int32, device=x.device)
    _scan[samples, triton.cdiv(channels, _COLUMNS)](
        x, sums, extremes, places, samples * channels, channels, length,
        ACC=tl.float64 if double else tl.float32, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return sums, extremes, places


def spread(
    x: torch.Tensor, grad: torch.Tensor, places: torch.Tensor, per_channel: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The gradient of the input, from that at one place per sample and channel.

    `per_channel`: the mean, invstd times weight, the mean gradient, and the slope along the centred input.
    """
    samples, length, channels = x.shape
    blocks = triton.cdiv(length, _ROWS * _TILES)
    out = torch.empty_like(x)
    _spread[samples * blocks, triton.cdiv(channels, _COLUMNS)](
        x, grad, places, *per_channel, out, channels, length, blocks, ROWS=_ROWS, COLUMNS=_COLUMNS, TILES=_TILES
    )
    return out
