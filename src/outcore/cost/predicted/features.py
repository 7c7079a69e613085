"""The numbers by which operations resemble each other.

A regression over raw sizes must discover that time grows with their product. Here the product is given:
logarithms of work, traffic and their ratio at this device's ridge, of the sizes of the matrix product a layer
becomes (rows, columns, inner size), and the two roundings that make real times jump: channels padded up to a
vector or tile, and tiles spread over a whole number of waves of multiprocessors.

The order of `NAMES` is part of the stored calibration: append, never reorder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outcore.cost.predicted.operation import VARIANTS, Operation
from outcore.cost.predicted.roofline import Ceiling
from outcore.machine.device import ELEMENT_BYTES

Matrix = npt.NDArray[np.float64]

_MOST_VARIANTS = max(map(len, VARIANTS.values()))
_TILE = 128
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 128, 0.7), (64, 64, 0.5))
"""Rows, columns and share of the peak rate of the tiles that matrix kernels are built from."""

_SHAPES = ((256, 128), (128, 128), (128, 64), (64, 64), (256, 64), (128, 32))
"""Tiles whose last wave is a feature each: which of them a library takes is what a regression has to find out."""

NAMES: tuple[str, ...] = (
    "flops",
    "bytes",
    "ridge",
    "batch",
    "in_channels",
    "out_channels",
    "groups",
    "in_pixels",
    "out_pixels",
    "shortest_side",
    "kernel",
    "longest_kernel",
    "stride",
    "dilation",
    "rows",
    "inner",
    "weight",
    "padded_in",
    "padded_out",
    "waves",
    "last_wave",
    "channels_last",
    "backward",
    "input_grad",
    "one_dim",
    "three_dim",
    "tile_time",
    "tile_and_memory",
    "memory_per_tile_time",
    "even_in",
    "even_out",
    "in_elements",
    "out_elements",
    *(f"variant_{index}" for index in range(_MOST_VARIANTS)),
    "weight_grad",
    "bias",
    *(f"idle_{tall}x{wide}" for tall, wide in _SHAPES),
    "columns_of_32",
    "inner_of_64",
    "product_rows",
    "product_columns",
    "product_inner",
    "eight_in",
    "whole_warps_in",
    "whole_warps_out",
    "three_by_three",
    "pointwise",
    "few_channels",
    "work_and_memory",
)


def features(operations: Sequence[Operation], ceiling: Ceiling) -> Matrix:
    """One row per operation, one column per name."""
    return np.array([_row(operation, ceiling) for operation in operations], dtype=np.float64)


def _row(op: Operation, ceiling: Ceiling) -> list[float]:
    group_in, group_out = max(1, op.in_channels // op.groups), max(1, op.out_channels // op.groups)
    kernel = math.prod(op.kernel) if op.kernel else 1
    out_pixels = math.prod(op.out_size)
    rows = op.batch * out_pixels
    tiles = math.ceil(rows / _TILE) * math.ceil(group_out / _TILE) * op.groups
    waves = tiles / ceiling.sms
    variants = VARIANTS.get(op.kind, ())
    tile_s = _tiled_s(op, group_in, group_out, kernel, ceiling)
    # Tensor cores read channels last; an image in the other order is turned round on the way in and out.
    turned = 0 if op.channels_last or not op.kernel else 2 * (op.in_elements + op.out_elements)
    memory_s = (op.nbytes + turned * ELEMENT_BYTES[op.dtype]) / ceiling.bytes_per_s + 1e-12
    roofline_s = ceiling.time_s(op) + 1e-12
    logarithms = (
        1 + op.flops,
        1 + op.nbytes,
        (op.flops / ceiling.flops_per_s + 1e-12) / (op.nbytes / ceiling.bytes_per_s + 1e-12),
        op.batch,
        group_in,
        group_out,
        op.groups,
        math.prod(op.size),
        out_pixels,
        min(op.out_size, default=1),
        kernel,
        max(op.kernel, default=1),
        math.prod(op.stride),
        math.prod(op.dilation),
        rows,
        group_in * kernel,
        max(1, op.weight_elements),
        _padded(group_in),
        _padded(group_out),
        waves,
        math.ceil(waves) / waves,
        tile_s / roofline_s,
        (tile_s + memory_s) / roofline_s,
        memory_s / tile_s,
        _evenness(group_in),
        _evenness(group_out),
        op.in_elements,
        op.out_elements,
    )
    flags = (
        op.channels_last,
        op.direction == "backward",
        op.input_grad,
        len(op.size) == 1,
        len(op.size) == 3,
        *(op.variant == name for name in variants),
    )
    padding = (0.0,) * (_MOST_VARIANTS - len(variants))
    late = (op.weight_grad, op.bias)
    start = [*(math.log2(value) for value in logarithms), *map(float, flags), *padding, *map(float, late)]
    return [*start, *_product_row(op, group_in, group_out, kernel, ceiling)]


def _product_row(op: Operation, group_in: int, group_out: int, kernel: int, ceiling: Ceiling) -> list[float]:
    """The matrix product that an operation is, or the first of two: how it fills tiles, waves and vectors."""
    rows_out, rows_in = op.batch * math.prod(op.out_size), op.batch * math.prod(op.size)
    rows, columns, inner = rows_out, group_out, group_in * kernel
    if op.direction == "backward":
        rows, columns, inner = (
            (inner, group_out, rows_out) if op.weight_grad else (rows_in, group_in, group_out * kernel)
        )
    tiles = [math.ceil(rows / tall) * math.ceil(columns / wide) * op.groups / ceiling.sms for tall, wide in _SHAPES]
    logarithms = (
        *(math.ceil(waves) / waves for waves in tiles),
        _padded(columns, 32),
        _padded(inner, 64),
        rows,
        columns,
        inner,
    )
    flags = (
        op.in_channels % 8 == 0,
        op.in_channels % 32 == 0,
        op.out_channels % 32 == 0,
        set(op.kernel) == {3},
        kernel == 1,
        op.in_channels <= 4,
    )
    whole_s = op.flops / ceiling.flops_per_s + op.nbytes / ceiling.bytes_per_s + ceiling.floor_s
    last = whole_s / (ceiling.time_s(op) + 1e-12) + 1e-12
    return [*(math.log2(value) for value in logarithms), *map(float, flags), math.log2(last)]


def _tiled_s(op: Operation, group_in: int, group_out: int, kernel: int, ceiling: Ceiling) -> float:
    """Time of the matrix product an operation becomes, in whole tiles on whole waves, by the best tile."""
    if not op.flops:
        return 1e-12
    rows_out, rows_in = op.batch * math.prod(op.out_size), op.batch * math.prod(op.size)
    if op.direction == "forward":
        return _product_s(rows_out, group_out, group_in * kernel, op.groups, ceiling)
    time_s = 0.0
    if op.weight_grad:
        time_s = _product_s(group_in * kernel, group_out, rows_out, op.groups, ceiling, split=True)
    if op.input_grad:
        time_s += _product_s(rows_in, group_in, group_out * kernel, op.groups, ceiling)
    return time_s


def _product_s(rows: int, columns: int, inner: int, groups: int, ceiling: Ceiling, *, split: bool = False) -> float:
    best = math.inf
    for tall, wide, share in _TILES:
        tiles, depth = math.ceil(rows / tall) * math.ceil(columns / wide) * groups, math.ceil(inner / 32) * 32
        if split and tiles < ceiling.sms:  # a weight gradient has few tiles and a long sum, which is shared out
            parts = min(ceiling.sms // tiles, max(1, depth // 256))
            tiles, depth = tiles * parts, math.ceil(depth / parts)
        waves = math.ceil(tiles / ceiling.sms)
        best = min(best, waves * 2 * tall * wide * depth / (ceiling.flops_per_s / ceiling.sms * share))
    return best


def _evenness(channels: int) -> int:
    """The largest power of two up to 16 that divides the channels: how wide a load can be."""
    return min(16, channels & -channels)


def _padded(channels: int, to: int = 64) -> float:
    """How much longer the channels are once rounded up to whole vectors or tiles."""
    return math.ceil(channels / to) * to / channels
