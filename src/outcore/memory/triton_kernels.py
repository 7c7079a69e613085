"""Triton kernels for a GPU: flags to bits and back, indices to positions in a window and back, each in one pass."""

# mypy: ignore-errors

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from outcore.memory.codecs import Window

__all__ = ["pack", "to_indices", "to_positions", "unpack"]

_BLOCK = 1024


@triton.jit
def _pack(flat, out, count, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    flag = (tl.load(flat + place, mask=place < count, other=0) > 0).to(tl.int32)
    packed = tl.sum(flag << tl.arange(0, 8)[None, :], axis=1)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def _unpack(bits, out, level, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + place // 8, mask=place < count, other=0).to(tl.int32)
    flag = (byte >> (place % 8).to(tl.int32)) & 1
    high = tl.load(level)
    tl.store(out + place, tl.where(flag == 1, high, high * 0), mask=place < count)


@triton.jit
def _origins(place, shape, geometry, inner, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Coordinate of an output along one dimension, as the beginning of its window."""
    rest = place // inner
    for d in tl.static_range(DIMS - 1, DIM, -1):
        rest = rest // tl.load(shape + d)
    return (rest % tl.load(shape + DIM)) * tl.load(geometry + 4 * DIM + 1) - tl.load(geometry + 4 * DIM + 2)


@triton.jit
def _to_positions(indices, out, shape, image, geometry, count, inner, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(indices + place, mask=place < count, other=0)
    code = tl.zeros([BLOCK], dtype=tl.int64)
    radix = 1
    for d in tl.static_range(DIMS - 1, -1, -1):
        size = tl.load(image + d)
        offset = (rest % size - _origins(place, shape, geometry, inner, d, DIMS)) // tl.load(geometry + 4 * d + 3)
        code += offset * radix
        radix = radix * tl.load(geometry + 4 * d)
        rest = rest // size
    tl.store(out + place, code.to(tl.uint8), mask=place < count)


@triton.jit
def _to_indices(positions, out, shape, image, geometry, count, inner, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(positions + place, mask=place < count, other=0).to(tl.int64)
    index = tl.zeros([BLOCK], dtype=tl.int64)
    scale = tl.full([], 1, dtype=tl.int64)
    for d in tl.static_range(DIMS - 1, -1, -1):
        kernel = tl.load(geometry + 4 * d)
        offset = (rest % kernel) * tl.load(geometry + 4 * d + 3)
        index += (_origins(place, shape, geometry, inner, d, DIMS) + offset) * scale
        scale = scale * tl.load(image + d)
        rest = rest // kernel
    tl.store(out + place, index, mask=place < count)


def pack(flat: torch.Tensor, out: torch.Tensor) -> None:
    """Write which elements are above zero, eight to a byte."""
    if count := flat.numel():
        source = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
        _pack[(triton.cdiv(out.numel(), _BLOCK),)](source, out, count, BLOCK=_BLOCK)


def unpack(bits: torch.Tensor, out: torch.Tensor, level: torch.Tensor | float) -> None:
    """Write zero where a bit is zero and the level where it is one."""
    target = out.view(torch.uint8) if out.dtype is torch.bool else out
    one = level if isinstance(level, torch.Tensor) else torch.full((), level, dtype=target.dtype, device=out.device)
    if count := out.numel():
        _unpack[(triton.cdiv(count, 4 * _BLOCK),)](bits, target, one.to(target.dtype), count, BLOCK=4 * _BLOCK)


def to_positions(indices: torch.Tensor, out: torch.Tensor, window: Window) -> None:
    """Write where in its window each maximum lies."""
    _positions(_to_positions, indices, out, window)


def to_indices(positions: torch.Tensor, out: torch.Tensor, window: Window) -> None:
    """Write the index in the image of each position."""
    _positions(_to_indices, positions, out, window)


def _positions(kernel: Any, given: torch.Tensor, out: torch.Tensor, window: Window) -> None:
    dims = len(window.image)
    tables = _tables(window, tuple(given.shape[given.dim() - dims :]), given.device)
    inner = 1 if given.is_contiguous() else given.shape[1]  # channels last
    if count := given.numel():
        kernel[(triton.cdiv(count, _BLOCK),)](given, out, *tables, count, inner, DIMS=dims, BLOCK=_BLOCK)


@lru_cache(64)
def _tables(window: Window, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Size of the output, size of the image, and the window, on the device."""
    rows = zip(window.kernel, window.stride, window.padding, window.dilation, strict=True)
    tables = (shape, window.image, [list(row) for row in rows])
    return tuple(torch.tensor(table, dtype=torch.int64, device=device) for table in tables)
