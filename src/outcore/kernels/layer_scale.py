"""Triton kernels of a residual sum whose branch is scaled: by a number per channel, and maybe by one per image.

One pass over memory each way. The channels of a pixel lie side by side, so a tensor is rows of channels, and a tile is
some rows of some channels. Every program of backward adds up its part of the scale's gradient while it goes through its
tiles; the parts are summed afterwards, always in the same order.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outcore.kernels.row_blocks import TILE, programs

_WARPS = 8
_TILES = 2
"""Tiles that a program of forward writes."""
_COLUMNS = 1024
"""Channels of a tile, at most."""


@triton.jit
def _factor(scale, noise, c, r, first, rows, width, each, ACC: tl.constexpr, NOISE: tl.constexpr):
    """What every number of a tile is multiplied by."""
    by = tl.load(scale + c, mask=c < width, other=0.0).to(ACC)[None, :]
    if NOISE:
        by = by * tl.load(noise + (first + r) // each, mask=first + r < rows, other=0.0).to(ACC)[:, None]
    return by


@triton.jit
def _sum(
    x, scale, noise, residual, out, copy, rows, width, each,
    ACC: tl.constexpr, NOISE: tl.constexpr, COPY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    place = r[:, None] * width + c[None, :]
    for i in range(TILES):
        first = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS
        mask = (first + r < rows)[:, None] & (c < width)[None, :]
        v = tl.load(x + first * width + place, mask=mask, other=0.0).to(ACC)
        y = tl.load(residual + first * width + place, mask=mask, other=0.0).to(ACC)
        y += v * _factor(scale, noise, c, r, first, rows, width, each, ACC, NOISE)
        y = y.to(out.dtype.element_ty)
        tl.store(out + first * width + place, y, mask=mask)
        if COPY:
            tl.store(copy + first * width + place, y.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def _back(
    grad, of_copy, x, scale, noise, back, both, sums, rows, width, each, tiles,
    ACC: tl.constexpr, NOISE: tl.constexpr, COPY: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of some tiles, and this program's part of the scale's."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    place = r[:, None] * width + c[None, :]
    by = tl.load(scale + c, mask=c < width, other=0.0).to(ACC)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for i in range(tiles):
        first = (i * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        mask = (first + r < rows)[:, None] & (c < width)[None, :]
        g = tl.load(grad + first * width + place, mask=mask, other=0.0).to(ACC)
        if COPY:
            g += tl.load(of_copy + first * width + place, mask=mask, other=0.0).to(ACC)
            tl.store(both + first * width + place, g.to(both.dtype.element_ty), mask=mask)
        if NOISE:
            g = g * tl.load(noise + (first + r) // each, mask=first + r < rows, other=0.0).to(ACC)[:, None]
        if SUMS:
            total += g * tl.load(x + first * width + place, mask=mask, other=0.0).to(ACC)
        tl.store(back + first * width + place, (g * by).to(back.dtype.element_ty), mask=mask)
    if SUMS:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + c, tl.sum(total, axis=0), mask=c < width)


def _cut(x: torch.Tensor, width: int, noise: torch.Tensor | None) -> tuple[int, int, dict]:
    """How many rows there are, how many of an image, and how a tensor is cut."""
    rows, across = x.numel() // width, min(_COLUMNS, triton.next_power_of_2(width))
    acc = tl.float64 if x.dtype is torch.float64 else tl.float32
    each = rows // noise.numel() if noise is not None else rows
    return rows, each, {"ROWS": TILE // across, "COLUMNS": across, "ACC": acc, "NOISE": noise is not None}


def summed(
    x: torch.Tensor,
    scale: torch.Tensor,
    noise: torch.Tensor | None,
    residual: torch.Tensor,
    out: torch.Tensor,
    copy: torch.Tensor | None = None,
) -> None:
    """Write residual + x * scale * noise, in two types if asked for.

    All but scale and noise lie alike, with the channels of a pixel together.
    """
    width = scale.numel()
    rows, each, cut = _cut(x, width, noise)
    grid = (triton.cdiv(rows, cut["ROWS"] * _TILES), triton.cdiv(width, cut["COLUMNS"]))
    _sum[grid](
        x, scale, x if noise is None else noise, residual, out, out if copy is None else copy, rows, width, each,
        COPY=copy is not None, TILES=_TILES, num_warps=_WARPS, **cut,
    )  # fmt: skip


def gradients(
    gradient: torch.Tensor,
    of_copy: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    noise: torch.Tensor | None,
    *,
    sums: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of x; that of the scale, if it is asked for; and the sum of the two that were given, if so."""
    width, back = scale.numel(), torch.empty_like(x)
    rows, each, cut = _cut(x, width, noise)
    tiles = triton.cdiv(rows, cut["ROWS"])
    count = programs(tiles)
    precision = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts = torch.empty((count, width) if sums else 1, dtype=precision, device=x.device)
    both = None if of_copy is None else torch.empty_like(gradient)
    _back[(count, triton.cdiv(width, cut["COLUMNS"]))](
        gradient, gradient if of_copy is None else of_copy, x, scale, x if noise is None else noise, back,
        gradient if both is None else both, parts, rows, width, each,
        triton.cdiv(tiles, count), COPY=of_copy is not None, SUMS=sums, num_warps=_WARPS, **cut,
    )  # fmt: skip
    return back, parts.sum(0) if sums else None, both
