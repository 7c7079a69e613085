"""The coefficients of all steps at once, from inputs and states; what they are is in `outcore.scan.cells`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outcore.scan.cells import CellShape, LayerWeights, projected
from outcore.scan.kernels import gates as gate_kernels
from outcore.scan.linear import linear_recurrence

Memory = Tensor | tuple[Tensor, Tensor] | None


class Coefficients(NamedTuple):
    """What one pass over all steps yields: the coefficients, and the unprojected output that a projection
    needs."""

    values: Tensor
    """``[D, T, N, M, H]``: of an RNN its state, whose slope is d; of a GRU a_n before the reset gate, a_r, a_z, a_n
    and z; of an LSTM e, f, a_i, a_f, a_g and a_o."""
    unprojected: Tensor | None
    """``[D, T, N, H]``"""


def coefficients(
    cell: CellShape, x: Tensor, just_before: Tensor, after: Tensor, memory: Tensor | None, weights: LayerWeights
) -> Coefficients:
    """Coefficients of all steps at once.

    Args:
        cell: the cell.
        x: inputs ``[D, T, N, I]``.
        just_before: hidden states before the first step ``[D, N, P]``.
        after: hidden states after each step ``[D, T, N, P]``.
        memory: the LSTM's initial memory ``[D, N, H]``; later ones follow from the gates.
        weights: the parameters.
    """
    if cell.kind in ("tanh", "relu"):
        return Coefficients(after.unsqueeze(-2), None)
    if cell.kind == "gru":
        fused = gate_kernels.gru_coefficients(cell, x, just_before, after, weights)
    else:
        assert memory is not None
        fused = _lstm_fused(cell, x, just_before, after, memory, weights)
    if fused is not None:
        return Coefficients(fused, None)
    return coefficients_from(cell, x, shifted(just_before, after), after, memory, weights)


def shifted(just_before: Tensor, after: Tensor) -> Tensor:
    """Hidden states before each step."""
    return torch.cat((just_before.unsqueeze(1), after[:, :-1]), dim=1)


def coefficients_from(
    cell: CellShape, x: Tensor, before: Tensor, after: Tensor, memory: Memory, weights: LayerWeights
) -> Coefficients:
    """As `coefficients`, where the states before the steps need not be those after them.

    Args:
        cell: the cell.
        x: inputs ``[D, T, N, I]``.
        before: hidden states before each step ``[D, T, N, P]``.
        after: hidden states after each step.
        memory: the LSTM's initial memory ``[D, N, H]``, or its memories before and after each step.
        weights: the parameters.
    """
    if cell.kind in ("tanh", "relu"):
        return Coefficients(after.unsqueeze(-2), None)
    from_input = projected(x, weights.input, weights.input_bias, cell)
    from_hidden = projected(before, weights.hidden, weights.hidden_bias, cell)
    if cell.kind == "gru":
        return Coefficients(_gru(from_input, from_hidden, before), None)
    from_input += from_hidden
    del from_hidden
    return _lstm(from_input, memory, keep=weights.projection is not None)


def _gru(from_input: Tensor, from_hidden: Tensor, before: Tensor) -> Tensor:
    r, z = (from_input[..., :2, :] + from_hidden[..., :2, :]).sigmoid_().unbind(-2)
    pre = from_hidden[..., 2, :]
    n = torch.addcmul(from_input[..., 2, :], r, pre).tanh_()
    new = torch.empty((*from_input.shape[:-2], 5, from_input.shape[-1]), dtype=n.dtype, device=n.device)
    of_n = (1 - z) * (1 - n * n)
    new[..., 0, :] = of_n
    new[..., 1, :] = of_n * pre * r * (1 - r)
    new[..., 2, :] = (before - n) * z * (1 - z)
    new[..., 3, :] = of_n * r
    new[..., 4, :] = z
    return new


def memories(cell: CellShape, x: Tensor, before: Tensor, memory: Tensor, weights: LayerWeights) -> Tensor:
    """The LSTM's memories after each step ``[D, T, N, H]``: with the gates known, a diagonal linear
    recurrence."""
    gates = projected(x, weights.input, weights.input_bias, cell)
    gates += projected(before, weights.hidden, weights.hidden_bias, cell)
    i, f, g, _ = gates.unbind(-2)
    return linear_recurrence(f.sigmoid(), i.sigmoid() * g.tanh(), memory, dim=1, check=False)


def _lstm_fused(
    cell: CellShape, x: Tensor, just_before: Tensor, after: Tensor, memory: Tensor, weights: LayerWeights
) -> Tensor | None:
    """The coefficients in two kernels around the recurrence of the memories."""
    found = gate_kernels.lstm_gates(cell, x, just_before, after, weights)
    if found is None:
        return None
    gates, factors, added = found
    memories = linear_recurrence(factors, added, memory, dim=1, check=False)
    del found, factors, added
    return gate_kernels.lstm_coefficients(gates, memory, memories)


def _lstm(gates: Tensor, memory: Memory, keep: bool) -> Coefficients:
    i, f, g, o = gates.unbind(-2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    if isinstance(memory, tuple):
        before, after = memory
    else:
        assert memory is not None
        after = linear_recurrence(f, i * g, memory, dim=1, check=False)
        before = torch.cat((memory.unsqueeze(1), after[:, :-1]), dim=1)
    squashed = after.tanh()
    new = torch.empty((*gates.shape[:-2], 6, gates.shape[-1]), dtype=gates.dtype, device=gates.device)
    new[..., 0, :] = o * (1 - squashed * squashed)
    new[..., 1, :] = f
    new[..., 2, :] = g * i * (1 - i)
    new[..., 3, :] = before * f * (1 - f)
    new[..., 4, :] = i * (1 - g * g)
    new[..., 5, :] = squashed * o * (1 - o)
    return Coefficients(new, o * squashed if keep else None)
