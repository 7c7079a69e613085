"""Triton kernels of `outcore.stream.execute.conv_epilogue`: one pass over a channels-last tensor, forward and backward.

Rows are pixels, columns are channels (stride one). What is added may be a region of a larger tensor, so its pixels
are found by their place: rows of the result are counted over (sample, row, column) of the image.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["backward", "forward"]

_NUMBERS = 2048
"""Of one block, rows times columns."""
_COLUMNS = 64
_CHUNK = 16
"""Blocks of rows that one program works through, so that few partial sums are left."""


def _block(channels: int) -> tuple[int, int]:
    """Rows and columns of a block: no more columns than there are channels, or lanes would have nothing to do."""
    columns = min(_COLUMNS, triton.next_power_of_2(channels))
    return _NUMBERS // columns, columns


@triton.jit
def _forward(
    y, shift, residual, pixels, channels, height, width, sn, sh, sw,
    HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < pixels)[:, None] & (column < channels)[None, :]
    at = row[:, None] * channels + column[None, :]
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(shift + column, mask=column < channels, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        n = row // (height * width)
        rest = row - n * (height * width)
        h = rest // width
        place = n * sn + h * sh + (rest - h * width) * sw
        value += tl.load(residual + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    z, gradient, result, partial, pixels, channels,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for i in range(CHUNK):
        row = (tl.program_id(0).to(tl.int64) * CHUNK + i) * ROWS + tl.arange(0, ROWS)
        inside = (row < pixels)[:, None] & (column < channels)[None, :]
        at = row[:, None] * channels + column[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0)
        if RELU:
            g = tl.where(tl.load(z + at, mask=inside, other=0.0) > 0, g, 0.0)
            tl.store(result + at, g.to(result.dtype.element_ty), mask=inside)
        total += g.to(tl.float32)
    tl.store(partial + tl.program_id(0) * channels + column, tl.sum(total, 0), mask=column < channels)


def forward(y: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor | None, relu: bool) -> None:
    """y = relu(y + shift + residual), in place; y is dense and channels-last."""
    pixels, channels = y.numel() // y.shape[1], y.shape[1]
    height, width = y.shape[-2:]
    strides: tuple[Any, ...] = (0, 0, 0)
    if residual is not None:
        strides = (residual.stride(0), residual.stride(2), residual.stride(3))
    rows, columns = _block(channels)
    grid = (triton.cdiv(pixels, rows), triton.cdiv(channels, columns))
    _forward[grid](
        y, shift, residual if residual is not None else y, pixels, channels, height, width, *strides,
        HAS_RESIDUAL=residual is not None, RELU=relu, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def backward(z: torch.Tensor, gradient: torch.Tensor, relu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of what was added up, and its sum per channel."""
    pixels, channels = z.numel() // z.shape[1], z.shape[1]
    result = torch.empty_like(gradient) if relu else gradient
    rows, columns = _block(channels)
    programs = triton.cdiv(pixels, rows * _CHUNK)
    partial = torch.empty(programs, channels, dtype=torch.float32, device=z.device)
    grid = (programs, triton.cdiv(channels, columns))
    _backward[grid](
        z, gradient, result, partial, pixels, channels,
        RELU=relu, ROWS=rows, COLUMNS=columns, CHUNK=_CHUNK,
    )  # fmt: skip
    return result, partial.sum(0)
