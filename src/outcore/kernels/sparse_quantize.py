"""Triton kernels for numbers in less memory: those that are not zero, and eight or four bits in groups with a range.

*Sparse.* One pass finds which numbers are not zero, as bits, and how many in every block; the sums of these say where
in the result a block begins (the host waits for the last one, to know how much memory it takes); a second pass moves
them. Back it is one pass: a running count of the bits is the place of every number.

*Groups.* One pass each way. A program has some groups whole, so that range, rounding and writing need the numbers once.
Of four bits, two numbers that lie side by side share a byte, the first its lower half. Divisions are those of IEEE and
nothing is contracted, so codes and numbers are those of the same steps in torch.

*Halves.* Numbers of 16 bits become wider in one pass at the memory's rate, twice that of torch's own cast.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Numbers whose place is counted together."""
_ROWS = 8
"""Groups that a program has."""


@triton.jit
def _survey(words, bits, counts, count, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    flag = (tl.load(words + place, mask=place < count, other=0) != 0).to(tl.int32)
    tl.store(bits + byte, tl.sum(flag << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8), mask=byte * 8 < count)
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(flag, axis=1), axis=0))


@triton.jit
def _gather(words, values, ends, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < count, other=0)
    flag = (word != 0).to(tl.int32)
    rank = tl.cumsum(flag, axis=0)
    start = tl.load(ends + tl.program_id(0)) - tl.sum(flag, axis=0)
    tl.store(values + start + rank - 1, word, mask=flag == 1)


@triton.jit
def _scatter(bits, values, ends, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + place // 8, mask=place < count, other=0).to(tl.int32)
    flag = (byte >> (place % 8).to(tl.int32)) & 1
    rank = tl.cumsum(flag, axis=0)
    start = tl.load(ends + tl.program_id(0)) - tl.sum(flag, axis=0)
    word = tl.load(values + start + rank - 1, mask=flag == 1, other=0)
    tl.store(out + place, word, mask=place < count)


@triton.jit
def _quantise(
    flat, codes, low, scale, count, LEVELS: tl.constexpr, TINY: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = place < count
    value = tl.load(flat + place, mask=there, other=0).to(tl.float32)
    broken = tl.max((value != value).to(tl.int32), axis=1) == 1
    least = tl.where(broken, float("nan"), tl.min(tl.where(there, value, float("inf")), axis=1))
    most = tl.max(tl.where(there, value, float("-inf")), axis=1)
    step = tl.math.div_rn(most - least, tl.full([ROWS], LEVELS, tl.float32))
    step = tl.where(step < TINY, TINY, step)
    per_step = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32), step)
    level = (value - least[:, None]) * per_step[:, None]
    level = (level + 12582912.0) - 12582912.0  # to the nearest, halves to the even one
    above = (value > 0) & ((least == 0) & (step < float("inf")))[:, None]
    level = tl.where(above & (level < 1), 1.0, tl.where(level > 0, level, 0.0)).to(tl.int32)
    if LEVELS == 15:
        level = tl.where(there, level, 0)
        place = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        there = place * 2 < count
        first, second = tl.split(tl.reshape(level, [ROWS, GROUP // 2, 2]))
        level = first | (second << 4)
    tl.store(codes + place, level.to(tl.uint8), mask=there)
    tl.store(low + row, least, mask=row * GROUP < count)
    tl.store(scale + row, step, mask=row * GROUP < count)


@triton.jit
def _dequantise(codes, low, scale, out, count, LEVELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = place < count
    if LEVELS == 15:
        pair = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        both = tl.load(codes + pair, mask=pair * 2 < count, other=0).to(tl.int32)
        code = tl.reshape(tl.join(both & 15, both >> 4), [ROWS, GROUP]).to(tl.float32)
    else:
        code = tl.load(codes + place, mask=there, other=0).to(tl.float32)
    step = tl.load(scale + row, mask=row * GROUP < count, other=0.0)
    least = tl.load(low + row, mask=row * GROUP < count, other=0.0)
    tl.store(out + place, (code * step[:, None] + least[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit
def _widen(small, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(small + place, mask=place < count, other=0.0)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < count)


def widen(small: torch.Tensor, out: torch.Tensor) -> None:
    """Write numbers in a wider type."""
    if count := small.numel():
        _widen[(triton.cdiv(count, BLOCK),)](small, out, count, BLOCK=BLOCK, num_warps=8)


def survey(words: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Write which words are not zero as bits; returns how many there are up to the end of every block."""
    blocks = triton.cdiv(words.numel(), BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=words.device)
    if blocks:
        _survey[(blocks,)](words, bits, counts, words.numel(), BYTES=BLOCK // 8)
    return counts.cumsum(0)


def gather(words: torch.Tensor, ends: torch.Tensor, values: torch.Tensor) -> None:
    """Write the words that are not zero one after the other."""
    if values.numel():
        _gather[(ends.numel(),)](words, values, ends, words.numel(), BLOCK=BLOCK, num_warps=8)


def scatter(bits: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """Write the words back to where they were, and zeros between them."""
    if ends.numel():
        _scatter[(ends.numel(),)](bits, values, ends, out, out.numel(), BLOCK=BLOCK, num_warps=8)


def quantise(
    flat: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    scale: torch.Tensor,
    *,
    levels: int,
    group: int,
    tiny: float,
) -> None:
    """Write the number of each number's step in the range of its group, of so many (255 or 15), and the ranges."""
    if count := flat.numel():
        settings = {"LEVELS": levels, "TINY": tiny, "GROUP": group, "ROWS": _ROWS}
        _quantise[(triton.cdiv(low.numel(), _ROWS),)](
            flat, codes, low, scale, count, **settings, enable_fp_fusion=False
        )


def dequantise(
    codes: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, *, levels: int, group: int
) -> None:
    """Write the numbers that the steps stand for."""
    if count := out.numel():
        settings = {"LEVELS": levels, "GROUP": group, "ROWS": _ROWS}
        _dequantise[(triton.cdiv(low.numel(), _ROWS),)](
            codes, low, scale, out, count, **settings, enable_fp_fusion=False
        )
