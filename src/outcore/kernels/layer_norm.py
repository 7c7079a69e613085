"""Triton kernels of layer norm: one pass over memory forward, one backward.

A program holds whole rows, so mean and deviation are found from registers: forward reads a row and writes it, backward
finds both again from the row it has to read anyway. Every program of backward adds up its part of the gradients of
weight and bias while it goes through its rows; the parts are summed afterwards, always in the same order.

Numbers are read in the type they have, computed with in single precision (double, if that is their type) and written in
the type that is asked for.
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


@triton.jit
def _centred(v, inside, width, EPS: tl.constexpr):
    """Rows less their means, and their inverse deviations."""
    mean = tl.sum(v, axis=1) / width
    centred = tl.where(inside[None, :], v - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / width
    return centred, 1.0 / tl.sqrt(variance + EPS)


@triton.jit
def _normalise(
    x, weight, bias, out, rows, width,
    EPS: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    inside = c < width
    r = tl.arange(0, ROWS)
    place = r[:, None] * width + c[None, :]
    if WEIGHT:
        w = tl.load(weight + c, mask=inside, other=0.0).to(ACC)
    if BIAS:
        b = tl.load(bias + c, mask=inside, other=0.0).to(ACC)
    for i in range(TILES):
        first = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS
        mask = (first + r < rows)[:, None] & inside[None, :]
        v = tl.load(x + first * width + place, mask=mask, other=0.0).to(ACC)
        centred, inverse = _centred(v, inside, width, EPS)
        y = centred * inverse[:, None]
        if WEIGHT:
            y = y * w[None, :]
        if BIAS:
            y = y + b[None, :]
        tl.store(out + first * width + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _back(
    grad, x, weight, back, sums, plane, rows, width, tiles,
    EPS: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of some tiles of rows, and this program's part of those of weight and bias."""
    c = tl.arange(0, WIDTH)
    inside = c < width
    r = tl.arange(0, ROWS)
    place = r[:, None] * width + c[None, :]
    if WEIGHT:
        w = tl.load(weight + c, mask=inside, other=0.0).to(ACC)
    of_weight = tl.zeros([ROWS, WIDTH], dtype=ACC)
    of_bias = tl.zeros([ROWS, WIDTH], dtype=ACC)
    for i in range(tiles):
        first = (i * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS
        mask = (first + r < rows)[:, None] & inside[None, :]
        v = tl.load(x + first * width + place, mask=mask, other=0.0).to(ACC)
        g = tl.load(grad + first * width + place, mask=mask, other=0.0).to(ACC)
        centred, inverse = _centred(v, inside, width, EPS)
        hat = centred * inverse[:, None]
        if SUMS:
            of_weight += g * hat
            of_bias += g
        if WEIGHT:
            g = g * w[None, :]
        along = tl.sum(g * hat, axis=1) / width
        mean = tl.sum(g, axis=1) / width
        d = (g - mean[:, None] - hat * along[:, None]) * inverse[:, None]
        tl.store(back + first * width + place, d.to(back.dtype.element_ty), mask=mask)
    if SUMS:
        to = sums + tl.program_id(0) * width + c
        tl.store(to, tl.sum(of_weight, axis=0), mask=inside)
        tl.store(to + plane, tl.sum(of_bias, axis=0), mask=inside)


def _cut(x: torch.Tensor, width: int) -> tuple[int, dict]:
    """How many rows there are, and how a tensor is cut."""
    across = triton.next_power_of_2(width)
    acc = tl.float64 if x.dtype is torch.float64 else tl.float32
    return x.numel() // width, {
        "ROWS": max(1, TILE // across),
        "WIDTH": across,
        "ACC": acc,
        "num_warps": _WARPS if across <= TILE else 16,
    }


def normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    width: int,
    eps: float,
    kind: torch.dtype,
) -> torch.Tensor:
    """Layer norm of a contiguous tensor over its last numbers, written in a type."""
    out = torch.empty_like(x, dtype=kind)
    rows, cut = _cut(x, width)
    _normalise[(triton.cdiv(rows, cut["ROWS"] * _TILES),)](
        x, x if weight is None else weight, x if bias is None else bias, out, rows, width,
        EPS=eps, WEIGHT=weight is not None, BIAS=bias is not None, TILES=_TILES, **cut,
    )  # fmt: skip
    return out


def gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, width: int, eps: float, *, sums: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of the input; and those of weight and bias, one after the other, if they are asked for."""
    back = torch.empty_like(x)
    rows, cut = _cut(x, width)
    tiles = triton.cdiv(rows, cut["ROWS"])
    count = programs(tiles)
    precision = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts = torch.empty((2, count, width) if sums else 1, dtype=precision, device=x.device)
    _back[(count,)](
        gradient, x, x if weight is None else weight, back, parts, count * width, rows, width,
        triton.cdiv(tiles, count), EPS=eps, WEIGHT=weight is not None, SUMS=sums, **cut,
    )  # fmt: skip
    return back, parts.sum(1) if sums else None
