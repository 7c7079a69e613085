"""The gates of all steps and the coefficients that come from them, as kernels; see `outcore.scan.cells`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.scan.kernels.available import available, dot_precision, fits, interpreted, or_none, power_of_two

if TYPE_CHECKING:
    from outcore.scan.cells import CellShape, LayerWeights

_TILES = {"gru": (32, 2), "lstm": (32, 2)}
"""Rows of a program at a time, and its warps."""
_SHARES = 132 * 4
"""Programs that share the rows."""
_WORKING = (torch.float32, torch.float64)
_WIDEST = 32


def takes(cell: CellShape, x: Tensor) -> bool:
    """Whether gates are found by a kernel."""
    return available(x) and x.dtype in _WORKING and narrow(cell) and fits(cell, x.dtype)


def narrow(cell: CellShape) -> bool:
    """Whether all weights of a cell stay in one program's registers."""
    return cell.hidden <= _WIDEST and cell.input <= _WIDEST and not cell.projection


def gru_coefficients(cell: CellShape, x: Tensor, before: Tensor, after: Tensor, weights: LayerWeights) -> Tensor | None:
    """The coefficients of a GRU ``[D, T, N, 5, H]`` in one pass; see `outcore.scan.cells`.

    Args:
        cell: the cell.
        x: inputs ``[D, T, N, I]``.
        before: hidden states before the first step ``[D, N, H]``.
        after: hidden states after each step ``[D, T, N, H]``.
        weights: the parameters.
    """
    return _gru_coefficients(cell, x, before, after, weights) if takes(cell, x) else None


@or_none("the gates of a GRU")
def _gru_coefficients(cell: CellShape, x: Tensor, before: Tensor, after: Tensor, weights: LayerWeights) -> Tensor:
    from outcore.kernels.recurrent import gates as gates_triton_kernels

    out = x.new_empty((*x.shape[:3], 5, cell.hidden))
    _over_rows(gates_triton_kernels.gru_values, cell, x, before, after, weights, out)
    return out


def lstm_gates(
    cell: CellShape, x: Tensor, before: Tensor, after: Tensor, weights: LayerWeights
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gates of an LSTM ``[D, T, N, 4, H]``, and factors and additions of the recurrence that its memories
    follow; arguments as above."""
    return _lstm_gates(cell, x, before, after, weights) if takes(cell, x) else None


@or_none("the gates of an LSTM")
def _lstm_gates(
    cell: CellShape, x: Tensor, before: Tensor, after: Tensor, weights: LayerWeights
) -> tuple[Tensor, Tensor, Tensor]:
    from outcore.kernels.recurrent import gates as gates_triton_kernels

    gates = x.new_empty((*x.shape[:3], 4, cell.hidden))
    factors, added = (x.new_empty((*x.shape[:3], cell.hidden)) for _ in range(2))
    _over_rows(gates_triton_kernels.lstm_gates, cell, x, before, after, weights, gates, factors, added)
    return gates, factors, added


def _over_rows(
    kernel: Any, cell: CellShape, x: Tensor, before: Tensor, after: Tensor, weights: LayerWeights, *out: Tensor
) -> None:
    D, T, N, size = x.shape
    rows, (block, warps) = T * N, _TILES[cell.kind]
    share = max(4, -(-rows // (block * max(1, _SHARES // D)))) * block
    bias = weights.input_bias is not None and weights.hidden_bias is not None
    biases = (weights.input_bias, weights.hidden_bias) if bias else (x, x)
    kernel[(max(1, -(-(rows - N) // share)), D)](
        x.contiguous(), after.contiguous(), before.contiguous(), weights.input.contiguous(),
        weights.hidden.contiguous(), *biases, *out, rows, N, share,
        H=cell.hidden, IN=size, BIAS=bias, LIBRARY=not interpreted(),
        PRECISION=dot_precision(x.dtype),
        HP=power_of_two(cell.hidden), IP=power_of_two(size), BLOCK=block, num_warps=warps, num_stages=1,
    )  # fmt: skip


def lstm_coefficients(gates: Tensor, memory: Tensor, after: Tensor) -> Tensor | None:
    """The coefficients of an LSTM in one pass, once its memories are known."""
    return _lstm_coefficients(gates, memory, after)


@or_none("the coefficients of an LSTM")
def _lstm_coefficients(gates: Tensor, memory: Tensor, after: Tensor) -> Tensor:
    from outcore.kernels.recurrent import gates as gates_triton_kernels

    D, T, N, _, H = gates.shape
    out = gates.new_empty((D, T, N, 6, H))
    block, warps = _TILES["lstm"]
    gates_triton_kernels.lstm_values[(-(-T * N // block), D)](
        gates, memory.contiguous(), after.contiguous(), out, T * N, N,
        H=H, LIBRARY=not interpreted(), HP=power_of_two(H), BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out
