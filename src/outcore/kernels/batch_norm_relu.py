"""Triton kernels of batch norm with ReLU, forward: statistics of every channel, and normalising with them.

One pass over memory each. Every channel of every image is cut into pieces, so that one image of a few channels fills
the device too; a third, small kernel adds up the pieces, always in the same order, and does whatever else there is to
do per channel. That is what keeps the host from being the slowest part: a norm is three launches and no arithmetic on
small tensors, each of which would cost the interpreter as much as a launch.

Where channels are contiguous, a piece is a run of one channel of one image ("rows"); where the channels of a pixel lie
side by side (channels last), it is a tile of pixels and channels ("columns").
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_PIECE = 16 * _BLOCK
"""Elements of a channel that one program sums up."""
_COLUMNS = 64
"""Channels of a tile where the channels of a pixel lie side by side."""
_TILES = 4
"""Tiles that one program writes."""
_PROGRAMS = 4096
"""More than these would only leave more to add up."""


@triton.jit
def rounded(v, m, s, w, b, ORDER: tl.constexpr, RELU: tl.constexpr):
    """Normalise, rounding in one of the known orders."""
    if ORDER == 0:
        y = w * (v - m) * s + b
    elif ORDER == 1:
        y = (v - m) * s * w + b
    elif ORDER == 2:
        y = v * (s * w) + (b - m * (s * w))
    else:
        y = (v - m) * (s * w) + b
    if RELU:
        y = tl.where(y <= 0, 0.0, y)
    return y


@triton.jit
def row_of(mean, invstd, weight, bias, channels, blocks, BLOCK: tl.constexpr):
    """The row a program works on, its channel, the places in the row, and the channel's statistics and weights."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    c = row % channels
    m, s = tl.load(mean + c), tl.load(invstd + c)
    return row, c, place, m, s, tl.load(weight + c).to(m.dtype), tl.load(bias + c).to(m.dtype)


@triton.jit
def columns_of(mean, invstd, weight, bias, c, inside):
    """Statistics and weights of some channels, as a row."""
    m = tl.load(mean + c, mask=inside, other=0.0)
    s = tl.load(invstd + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0).to(m.dtype)
    b = tl.load(bias + c, mask=inside, other=0.0).to(m.dtype)
    return m[None, :], s[None, :], w[None, :], b[None, :]


@triton.jit
def _normalise_rows(
    x, out, mean, invstd, weight, bias, channels, inner, blocks,
    ORDER: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, _, place, m, s, w, b = row_of(mean, invstd, weight, bias, channels, blocks, BLOCK)
    v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(m.dtype)
    y = rounded(v, m, s, w, b, ORDER, RELU)
    tl.store(out + row * inner + place, y.to(out.dtype.element_ty), mask=place < inner)


@triton.jit
def _normalise_columns(
    x, out, mean, invstd, weight, bias, channels, rows,
    ORDER: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    m, s, w, b = columns_of(mean, invstd, weight, bias, c, inside)
    for i in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + i) * ROWS + tl.arange(0, ROWS)
        place = r[:, None] * channels + c[None, :]
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + place, mask=mask, other=0.0).to(m.dtype)
        tl.store(out + place, rounded(v, m, s, w, b, ORDER, RELU).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_rows(
    x, sums, plane, channels, images, inner, pieces, ACC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Sums and sums of squares of a piece, less the channel's first number."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    c = row % channels
    first = tl.load(x + c * inner).to(ACC)
    total = tl.zeros([BLOCK], dtype=ACC)
    square = tl.zeros([BLOCK], dtype=ACC)
    for i in range(BLOCKS):
        place = (piece * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + row * inner + place, mask=place < inner, other=0.0).to(ACC)
        v = tl.where(place < inner, v - first, 0.0)
        total += v
        square += v * v
    to = (c * images + row // channels) * pieces + piece
    tl.store(sums + to, tl.sum(total, axis=0))
    tl.store(sums + plane + to, tl.sum(square, axis=0))


@triton.jit
def _sum_columns(
    x, sums, plane, channels, rows,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES,
):  # fmt: skip
    """The same for a tile."""
    piece = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < channels
    first = tl.load(x + c, mask=inside, other=0.0).to(ACC)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    square = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for i in range(TILES):
        r = (piece * TILES + i) * ROWS + tl.arange(0, ROWS)
        mask = (r[:, None] < rows) & inside[None, :]
        v = tl.load(x + r[:, None] * channels + c[None, :], mask=mask, other=0.0).to(ACC)
        v = tl.where(mask, v - first, 0.0)
        total += v
        square += v * v
    tl.store(sums + piece * channels + c, tl.sum(total, axis=0), mask=inside)
    tl.store(sums + plane + piece * channels + c, tl.sum(square, axis=0), mask=inside)


@triton.jit
def added_up(sums, c, inside, channels, pieces, across, along, PIECES: tl.constexpr, CHANNELS: tl.constexpr):
    """The pieces of some channels, summed up in double precision."""
    total = tl.zeros([PIECES, CHANNELS], dtype=tl.float64)
    for start in range(0, pieces, PIECES):
        p = start + tl.arange(0, PIECES)
        mask = (p[:, None] < pieces) & inside[None, :]
        total += tl.load(sums + p[:, None] * along + c[None, :] * across, mask=mask, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _finish(
    x, sums, plane, weight, bias, running_mean, running_var, tracked, found,
    channels, pieces, across, along, step, count,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr, TRACKED: tl.constexpr, COUNTED: tl.constexpr,
    PIECES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean, inverse deviation, weight and bias of every channel; the statistics over all batches follow."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    shift = added_up(sums, c, inside, channels, pieces, across, along, PIECES, CHANNELS) / count
    square = added_up(sums + plane, c, inside, channels, pieces, across, along, PIECES, CHANNELS) / count
    mean = tl.load(x + c.to(tl.int64) * step, mask=inside, other=0.0).to(tl.float64) + shift
    variance = square - shift * shift
    variance = tl.where(variance <= 0, 0.0, variance)  # what is not a number stays so
    kind = found.dtype.element_ty
    tl.store(found + c, mean.to(kind), mask=inside)
    tl.store(found + channels + c, (1.0 / tl.sqrt(variance + EPS)).to(kind), mask=inside)
    tl.store(found + 2 * channels + c, tl.load(weight + c, mask=inside, other=0.0).to(kind), mask=inside)
    tl.store(found + 3 * channels + c, tl.load(bias + c, mask=inside, other=0.0).to(kind), mask=inside)
    if TRACKED:
        part = tl.full([CHANNELS], MOMENTUM, tl.float64)
        if COUNTED:  # the mean over all batches there were
            part /= tl.load(tracked).to(tl.float64)
        elif tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + 1)
        old = tl.load(running_mean + c, mask=inside, other=0.0).to(tl.float64)
        new = old + (mean - old) * part
        tl.store(running_mean + c, new.to(kind).to(running_mean.dtype.element_ty), mask=inside)
        old = tl.load(running_var + c, mask=inside, other=0.0).to(tl.float64)
        new = old + (variance * count / (count - 1) - old) * part
        tl.store(running_var + c, new.to(kind).to(running_var.dtype.element_ty), mask=inside)


class ReductionBlocks:
    """How a tensor is cut, and how the sums of the pieces lie in memory: a plane per kind of sum."""

    def __init__(self, shape: tuple[int, ...], contiguous: bool) -> None:
        self.images, self.channels = shape[0], shape[1]
        self.inner = 1
        for size in shape[2:]:
            self.inner *= size
        self.count = self.images * self.inner
        self.contiguous = contiguous
        if contiguous:
            block = min(_BLOCK, triton.next_power_of_2(max(1, self.inner)))
            times = max(1, min(_PIECE // block, triton.cdiv(self.inner, block)))
            self.each = triton.cdiv(self.inner, block * times)
            self.grid, self.tile = (self.images * self.channels * self.each,), {"BLOCK": block, "BLOCKS": times}
            self.pieces, self.across, self.along = self.images * self.each, self.images * self.each, 1
            self.step, self.blocks = self.inner, triton.cdiv(self.inner, block)
            self.writers, self.written = (self.images * self.channels * self.blocks,), {"BLOCK": block}
        else:
            columns = min(_COLUMNS, triton.next_power_of_2(self.channels))
            height, wide = _BLOCK // columns, triton.cdiv(self.channels, columns)
            times = max(16, triton.cdiv(self.count, height * max(1, _PROGRAMS // wide)))
            self.pieces, self.across, self.along = triton.cdiv(self.count, height * times), 1, self.channels
            self.grid, self.tile = (self.pieces, wide), {"ROWS": height, "COLUMNS": columns, "TILES": times}
            self.step = 1
            self.writers, self.written = (
                (triton.cdiv(self.count, height * _TILES), wide),
                {**self.tile, "TILES": _TILES},
            )
        self.plane = self.pieces * self.channels
        # To add them up: a channel per program where its pieces lie side by side.
        lanes = 1 if contiguous else min(16, triton.next_power_of_2(self.channels))
        self.adding = {"PIECES": min(1024 // lanes, triton.next_power_of_2(self.pieces)), "CHANNELS": lanes}
        self.adders = (triton.cdiv(self.channels, lanes),)


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], contiguous: bool) -> ReductionBlocks:
    return ReductionBlocks(shape, contiguous)


def pieces_of(x: torch.Tensor, *, last: bool = False) -> ReductionBlocks:
    """How a dense tensor is cut; `last`: by pixels, where it is both contiguous and channels-last too."""
    return _cut(tuple(x.shape), x.is_contiguous() and not last)


def statistics(x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Mean, inverse deviation, weight and bias of every channel, one after the other; the module's own follow."""
    cut = pieces_of(x)
    double = x.dtype is torch.float64
    precision, acc = (torch.float64, tl.float64) if double else (torch.float32, tl.float32)
    sums = torch.empty(2 * cut.plane, dtype=precision, device=x.device)
    if cut.contiguous:
        _sum_rows[cut.grid](x, sums, cut.plane, cut.channels, cut.images, cut.inner, cut.each, ACC=acc, **cut.tile)
    else:
        _sum_columns[cut.grid](x, sums, cut.plane, cut.channels, cut.count, ACC=acc, **cut.tile)
    found = torch.empty(4 * cut.channels, dtype=precision, device=x.device)
    follows, counted = module.running_mean is not None, module.momentum is None
    own = (module.running_mean, module.running_var, module.num_batches_tracked) if follows else (found,) * 3
    if follows and counted:
        own[2].add_(1)
    _finish[cut.adders](
        x, sums, cut.plane, module.weight, module.bias, *own, found,
        cut.channels, cut.pieces, cut.across, cut.along, cut.step, cut.count,
        EPS=module.eps, MOMENTUM=1.0 if counted else module.momentum, TRACKED=follows, COUNTED=counted, **cut.adding,
    )  # fmt: skip
    return found


def normalise(
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    order: int,
    relu: bool,
) -> torch.Tensor:
    """Normalise a contiguous or channels-last tensor."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    cut = pieces_of(x)
    given = (x, out, mean, invstd, weight, bias, cut.channels)
    if cut.contiguous:
        _normalise_rows[cut.writers](*given, cut.inner, cut.blocks, ORDER=order, RELU=relu, **cut.written)
    else:
        _normalise_columns[cut.writers](*given, cut.count, ORDER=order, RELU=relu, **cut.written)
    return out
