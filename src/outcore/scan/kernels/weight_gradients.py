"""The weights' gradients: one pass over all steps and sequences (`outcore.kernels.recurrent.weight_gradients`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outcore.scan.kernels.available import KIND, available, dot_precision, or_none, power_of_two

if TYPE_CHECKING:
    from outcore.scan.cells import CellShape

_MOST_COLUMNS = 128
"""States and inputs together; above, a matrix product of cuBLAS has enough to do."""
_COLUMNS = 32
"""Gates per program."""
_SHARES = 132 * 4
_TILES = {32: (32, 2), 64: (32, 2), 128: (32, 4)}
"""Rows summed over at a time, and warps, by the columns of the product; as measured on an H200."""
Summed = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Gradients of input weights, recurrent weights and their biases, as in `outcore.scan.cells.LayerWeights`."""


def weight_sums(
    cell: CellShape, totals: Tensor, values: Tensor, x: Tensor, before: Tensor, after: Tensor, bias: bool
) -> Summed | None:
    """Gradients of the weights.

    Args:
        cell: the cell.
        totals: gradients of the states ``[D, T, N, S]``, as `outcore.scan.backward.StateGradients` has them.
        values: coefficients.
        x: inputs ``[D, T, N, I]``.
        before: hidden states before the first step ``[D, N, H]``.
        after: hidden states after each step ``[D, T, N, H]``.
        bias: whether there are biases.
    """
    if not available(x) or not _takes(cell) or x.dtype not in (torch.float32, torch.float64):
        return None
    return _weight_sums(cell, totals, values, x, before, after, bias)


def partial_sums(cell: CellShape, directions: int, rows: int) -> int:
    """Numbers that the programs' sums take before they are added up."""
    if not _takes(cell):
        return 0
    left, right, share = _tiles(cell, directions, rows)
    return directions * -(-rows // share) * left * right


def _takes(cell: CellShape) -> bool:
    return not cell.projection and cell.hidden + cell.input + 1 <= _MOST_COLUMNS


def _tiles(cell: CellShape, directions: int, rows: int) -> tuple[int, int, int]:
    """Rows and columns of the product, and how many of the rows summed over a program takes."""
    left, right = cell.hidden * (1 if cell.gates == 1 else 4), columns(cell)
    programs, block = max(1, _SHARES // (directions * -(-left // _COLUMNS))), _TILES[right][0]
    return left, right, max(4, -(-rows // (block * programs))) * block


@or_none("the gradients of weights")
def _weight_sums(
    cell: CellShape, totals: Tensor, values: Tensor, x: Tensor, before: Tensor, after: Tensor, bias: bool
) -> Summed:
    from outcore.kernels.recurrent import weight_gradients

    D, T, N, size = x.shape
    H, rows = cell.hidden, T * N
    left, right, share = _tiles(cell, D, rows)
    columns, shares = -(-left // _COLUMNS), max(1, -(-(rows - N) // share))
    parts = x.new_empty((D, shares, left, right))
    kind = KIND[cell.kind]
    weight_gradients.sum_up[(shares, columns, D)](
        totals, values.contiguous(), x.contiguous(), after.contiguous(), before.contiguous(), parts,
        rows, N, share, shares,
        H=H, IN=size, S=cell.state, M=cell.coefficients, KIND=kind, LEFT=left,
        PRECISION=dot_precision(x.dtype), COLS=_COLUMNS, RIGHT=right,
        BLOCK=_TILES[right][0], num_warps=_TILES[right][1], num_stages=1,
    )  # fmt: skip
    return added_up(cell, parts, bias)


def columns(cell: CellShape) -> int:
    """Columns of the product: states, inputs and one, padded."""
    return power_of_two(cell.hidden + cell.input + 1, 32)


def added_up(cell: CellShape, parts: Tensor, bias: bool) -> Summed:
    """The gradients from the shares of the product ``[D, shares, rows, columns]``."""
    from outcore.kernels.recurrent import weight_gradients

    D, shares, left, right = parts.shape
    H, G, size = cell.hidden, cell.gates, cell.input
    of_input, of_hidden = parts.new_empty((D, G * H, size)), parts.new_empty((D, G * H, H))
    biases = parts.new_empty((2, D, G * H))
    weight_gradients.add_up[(left, D)](
        parts, of_input, of_hidden, biases[0], biases[1], shares,
        H=H, IN=size, KIND=KIND[cell.kind], LEFT=left, G=G, BIAS=bias, RIGHT=right, BLOCK=256, num_warps=8,
    )  # fmt: skip
    return of_input, of_hidden, biases[0] if bias else None, biases[1] if bias else None
