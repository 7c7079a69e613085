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

from outcore.cost.ceiling import Ceiling
from outcore.cost.opmodel import VARIANTS, Operation

__all__ = ["NAMES", "Matrix", "features"]

Matrix = npt.NDArray[np.float64]

_MOST_VARIANTS = max(map(len, VARIANTS.values()))
_TILE = 128

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
    "odd_bytes",
    *(f"variant_{index}" for index in range(_MOST_VARIANTS)),
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
    )
    flags = (
        op.channels_last,
        op.direction == "backward",
        op.input_grad,
        len(op.size) == 1,
        len(op.size) == 3,
        # Tensor cores and vector loads need rows of whole 16 bytes.
        group_in % 8 != 0 or group_out % 8 != 0,
        *(op.variant == name for name in variants),
    )
    padding = (0.0,) * (_MOST_VARIANTS - len(variants))
    return [*(math.log2(value) for value in logarithms), *map(float, flags), *padding]


def _padded(channels: int, to: int = 32) -> float:
    """How much longer the channels are once rounded up to whole vectors or tiles."""
    return math.ceil(channels / to) * to / channels
