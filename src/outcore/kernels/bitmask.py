"""Triton kernels for flags as bits and for positions in a window, each one pass over memory.

A tile is so many bytes of eight flags each, so that a byte is made and read once. Addresses are 64 bits wide; what is
divided (coordinates of a pool's outputs) is 32 bits wide where that is enough, as a division of 64 bits takes longer
than the memory it is for.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from outcore.kernels.pool_window import NOWHERE, PoolWindow

_BYTES = 512
_BLOCK = 2048


@triton.jit
def _eights(BYTES: tl.constexpr):
    """The bytes that a program has, and the eight elements of each."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    return byte, byte[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _together(flag):
    """Eight flags as a byte."""
    return tl.sum(flag.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def _apart(byte):
    """A byte as eight flags."""
    return ((byte.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1) == 1


@triton.jit
def _pack(flat, bits, count, BYTES: tl.constexpr):
    byte, place = _eights(BYTES)
    value = tl.load(flat + place, mask=place < count, other=0)
    tl.store(bits + byte, _together((value <= 0) == 0), mask=byte * 8 < count)


@triton.jit
def _unpack(bits, out, level, count, BYTES: tl.constexpr):
    byte, place = _eights(BYTES)
    flag = _apart(tl.load(bits + byte, mask=byte * 8 < count, other=0))
    high = tl.load(level)
    tl.store(out + place, tl.where(flag, high, high * 0), mask=place < count)


@triton.jit
def _rectify(x, out, bits, count, BYTES: tl.constexpr):
    byte, place = _eights(BYTES)
    value = tl.load(x + place, mask=place < count, other=0)
    below = value <= 0  # not so for what is no number: that goes through, as in torch
    tl.store(out + place, tl.where(below, tl.zeros_like(value), value), mask=place < count)
    tl.store(bits + byte, _together(below == 0), mask=byte * 8 < count)


@triton.jit
def _through(gradient, bits, out, count, BYTES: tl.constexpr):
    byte, place = _eights(BYTES)
    flag = _apart(tl.load(bits + byte, mask=byte * 8 < count, other=0))
    value = tl.load(gradient + place, mask=place < count, other=0)
    tl.store(out + place, tl.where(flag, value, tl.zeros_like(value)), mask=place < count)


@triton.jit
def _place_in_image(inner, depth, height, width, NUMBER: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """Where in memory the outputs of a program lie, and their coordinates."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    period = tl.full([], 1, tl.int64) * inner * depth * height * width
    local = (start % period).to(NUMBER) + tl.arange(0, BLOCK)
    if not CONTIGUOUS:
        local = local // inner
    row = local // width
    plane = row // height
    return start + tl.arange(0, BLOCK), plane % depth, row - plane * height, local - row * width


@triton.jit
def _to_positions(
    indices, out, count, inner, depth, height, width, image_height, image_width,
    KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    NONE: tl.constexpr, NUMBER: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, z, y, x = _place_in_image(inner, depth, height, width, NUMBER, CONTIGUOUS, BLOCK)
    index = tl.load(indices + place, mask=place < count, other=0).to(NUMBER)
    row = index // image_width
    plane = row // image_height
    x, y, z = x * SW - PW, y * SH - PH, z * SD - PD
    dx = (index - row * image_width - x) // DW
    dy = (row - plane * image_height - y) // DH
    dz = (plane - z) // DD
    outside = (x > 0) | (y > 0) | (z > 0) | (x % DW != 0) | (y % DH != 0) | (z % DD != 0)
    code = tl.where(outside & (index == 0), NONE, (dz * KH + dy) * KW + dx)
    tl.store(out + place, code.to(tl.uint8), mask=place < count)


@triton.jit
def _to_indices(
    positions, out, count, inner, depth, height, width, image_height, image_width,
    KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    NONE: tl.constexpr, NUMBER: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, z, y, x = _place_in_image(inner, depth, height, width, NUMBER, CONTIGUOUS, BLOCK)
    position = tl.load(positions + place, mask=place < count, other=0).to(NUMBER)
    plane = z * SD - PD + (position // (KH * KW)) * DD
    row = y * SH - PH + (position // KW) % KH * DH
    column = x * SW - PW + position % KW * DW
    index = tl.where(position == NONE, 0, (plane * image_height + row) * image_width + column)
    tl.store(out + place, index.to(tl.int64), mask=place < count)


def pack(flat: torch.Tensor, bits: torch.Tensor) -> None:
    """Write which elements are above zero or no numbers, eight to a byte."""
    if count := flat.numel():
        _pack[(triton.cdiv(bits.numel(), _BYTES),)](_plain(flat), bits, count, BYTES=_BYTES)


def unpack(bits: torch.Tensor, out: torch.Tensor, level: torch.Tensor) -> None:
    """Write zero where a bit is zero and the level where it is one."""
    if count := out.numel():
        grid = (triton.cdiv(bits.numel(), _BYTES),)
        _unpack[grid](bits, _plain(out), _plain(level.to(out.dtype)), count, BYTES=_BYTES)


def rectify(x: torch.Tensor, out: torch.Tensor, bits: torch.Tensor) -> None:
    """ReLU of memory, into other memory or the same, and where it let through, eight to a byte."""
    if count := x.numel():
        _rectify[(triton.cdiv(bits.numel(), _BYTES),)](x, out, bits, count, BYTES=_BYTES)


def through(gradient: torch.Tensor, bits: torch.Tensor, out: torch.Tensor) -> None:
    """A gradient where the bits are one, else zero."""
    if count := gradient.numel():
        _through[(triton.cdiv(bits.numel(), _BYTES),)](gradient, bits, out, count, BYTES=_BYTES)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def to_positions(indices: torch.Tensor, out: torch.Tensor, window: PoolWindow) -> None:
    """Write where in its window each maximum lies."""
    _positions(_to_positions, indices, out, window)


def to_indices(positions: torch.Tensor, out: torch.Tensor, window: PoolWindow) -> None:
    """Write the index in the image of each position."""
    _positions(_to_indices, positions, out, window)


def _positions(kernel: Any, given: torch.Tensor, out: torch.Tensor, window: PoolWindow) -> None:
    dims = len(window.image)
    if not (count := given.numel()):
        return

    def three(numbers: tuple[int, ...], fill: int) -> tuple[int, ...]:
        return (fill,) * (3 - dims) + tuple(numbers)

    inner = 1 if given.is_contiguous() else given.shape[1]  # channels last
    largest = max(inner * math.prod(given.shape[given.dim() - dims :]) + _BLOCK, math.prod(window.image))
    sizes = three(given.shape[given.dim() - dims :], 1)
    _, kh, kw = three(window.kernel, 1)
    sd, sh, sw = three(window.stride, 1)
    pd, ph, pw = three(window.padding, 0)
    dd, dh, dw = three(window.dilation, 1)
    kernel[(triton.cdiv(count, _BLOCK),)](
        given, out, count, inner, *sizes, *three(window.image, 1)[1:],
        KH=kh, KW=kw, SD=sd, SH=sh, SW=sw, PD=pd, PH=ph, PW=pw, DD=dd, DH=dh, DW=dw,
        NONE=NOWHERE, NUMBER=tl.int32 if largest < 2**31 else tl.int64, CONTIGUOUS=inner == 1, BLOCK=_BLOCK,
    )  # fmt: skip
