"""The recurrent cells of torch.nn, as their backward pass sees them.

All hidden states are known after the forward pass, so the gates of *all* steps are computed again by one
matrix product instead of being kept. From them come *coefficients* with which one step of back-propagation is
two things only: products with the coefficients, and one product with the recurrent weights W. With g the
gradient of h_t and g' that of h_{t-1}:

    RNN     g' = (d·g) W                                        d = tanh' or relu'
    GRU     g' = z·g + (a_r·g, a_z·g, a_n·g) W
    LSTM    q = e·g + gc                                        gc, gc' are the gradients of c_t, c_{t-1}
            g' = (a_i·q, a_f·q, a_g·q, a_o·g) W ,  gc' = f·q    with a projection, g is first mapped back
            through it

Written so, the Jacobian of a step is never formed; a product of Jacobians is the step applied to the rows of
a matrix.

Shapes: D directions, T steps, N sequences, H hidden, P = projection or H, G gates. Everything carries D
first, so that a bidirectional layer is one batched product; the reverse direction is stored with its time
already reversed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

CellKind = Literal["tanh", "relu", "gru", "lstm"]
_GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
_COEFFICIENTS = {"tanh": 1, "relu": 1, "gru": 5, "lstm": 6}


@dataclass(frozen=True, slots=True)
class CellShape:
    """Kind and sizes of a cell."""

    kind: CellKind
    input: int
    hidden: int
    projection: int = 0

    @property
    def output(self) -> int:
        """Size of the hidden state, P."""
        return self.projection or self.hidden

    @property
    def state(self) -> int:
        """Size of all that is passed on from step to step: (h, c) of an LSTM, else h."""
        return self.output + (self.hidden if self.kind == "lstm" else 0)

    @property
    def gates(self) -> int:
        """Number of gates, G."""
        return _GATES[self.kind]

    @property
    def coefficients(self) -> int:
        """Number of coefficients per hidden unit and step."""
        return _COEFFICIENTS[self.kind]


class LayerWeights(NamedTuple):
    """Parameters of one layer, directions stacked."""

    input: Tensor
    """``[D, G·H, I]``"""
    hidden: Tensor
    """``[D, G·H, P]``"""
    input_bias: Tensor | None
    """``[D, G·H]``"""
    hidden_bias: Tensor | None
    projection: Tensor | None
    """``[D, P, H]``"""


def step_back(
    cell: CellShape, rows: Tensor, values: Tensor, hidden: Tensor, projection: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Carry gradients back over one step.

    Args:
        cell: the cell.
        rows: gradients of the state after the step, ``[D, K, N, R, S]``.
        values: coefficients of the step, ``[D, K, N, M, H]``.
        hidden: recurrent weights.
        projection: the LSTM's projection.

    Returns:
        The gradients of the state before the step, and `rows` with an LSTM's gc replaced by q, an RNN's g by d·g.
    """
    a = values.unsqueeze(-3)  # [D, K, N, 1, M, H]
    if cell.kind in ("tanh", "relu"):
        gates = rows * _slope(cell, a[..., 0, :])
        return _times(gates, hidden), gates
    if cell.kind == "gru":
        gates = (rows.unsqueeze(-2) * a[..., 1:4, :]).flatten(-2)
        return _times(gates, hidden).addcmul_(rows, a[..., 4, :]), rows
    g, memory = rows[..., : cell.output], rows[..., cell.output :]
    full = g if projection is None else _times(g, projection)
    q = torch.addcmul(memory, full, a[..., 0, :])
    gates = torch.cat(((q.unsqueeze(-2) * a[..., 2:5, :]).flatten(-2), full * a[..., 5, :]), dim=-1)
    return torch.cat((_times(gates, hidden), q * a[..., 1, :]), dim=-1), torch.cat((g, q), dim=-1)


def _slope(cell: CellShape, h: Tensor) -> Tensor:
    """The derivative of tanh or relu where its value is h."""
    return 1 - h * h if cell.kind == "tanh" else (h > 0).to(h.dtype)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows ``[D, K, N, R, a]`` times ``[D, a, b]``."""
    out = torch.bmm(rows.reshape(len(rows), -1, rows.shape[-1]), weight)
    return out.view(*rows.shape[:-1], weight.shape[-1])


def gate_gradients(
    cell: CellShape, totals: Tensor, values: Tensor, projection: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the gates before their non-linearity, for all steps at once.

    Args:
        cell: the cell.
        totals: gradients of the states ``[D, T, N, S]``; of an LSTM's memory q, of an RNN d·g.
        values: coefficients.
        projection: the LSTM's projection.

    Returns:
        Those that reach the input weights and the recurrent weights, ``[D, T, N, G·H]`` (the same tensor but
        for a GRU), and the gradient of the projected output.
    """
    if cell.kind in ("tanh", "relu"):
        return totals, totals, None
    if cell.kind == "gru":
        to_hidden = totals.unsqueeze(-2) * values[..., 1:4, :]
        to_input = to_hidden.clone()
        torch.mul(totals, values[..., 0, :], out=to_input[..., 2, :])
        return to_input.flatten(-2), to_hidden.flatten(-2), None
    g, q = totals[..., : cell.output], totals[..., cell.output :]
    full = g if projection is None else torch.matmul(g, projection.unsqueeze(1))
    gates = torch.empty((*values.shape[:-2], 4, cell.hidden), dtype=values.dtype, device=values.device)
    torch.mul(q.unsqueeze(-2), values[..., 2:5, :], out=gates[..., :3, :])
    torch.mul(full, values[..., 5, :], out=gates[..., 3, :])
    return gates.flatten(-2), gates.flatten(-2), g if projection is not None else None


def step_on(cell: CellShape, state: Tensor, from_input: Tensor, weights: LayerWeights) -> Tensor:
    """The cell itself, one step for many sequences: state ``[D, K, N, S]``, inputs ``[D, K, N, G, H]``."""
    h = state[..., : cell.output]
    D, K, N, _ = h.shape
    rows = h.reshape(D, K * N, -1)
    if weights.hidden_bias is None:
        pre = torch.bmm(rows, weights.hidden.mT)
    else:
        pre = torch.baddbmm(weights.hidden_bias.unsqueeze(1), rows, weights.hidden.mT)
    pre = pre.view(D, K, N, cell.gates, cell.hidden)
    if cell.kind == "tanh":
        return (pre + from_input).tanh_().squeeze(-2)
    if cell.kind == "relu":
        return (pre + from_input).relu_().squeeze(-2)
    if cell.kind == "gru":
        r, z = (pre[..., :2, :] + from_input[..., :2, :]).sigmoid_().unbind(-2)
        n = torch.addcmul(from_input[..., 2, :], r, pre[..., 2, :]).tanh_()
        return n + z * (h - n)
    i, f, g, o = (pre + from_input).unbind(-2)
    c = f.sigmoid() * state[..., cell.output :] + i.sigmoid() * g.tanh()
    full = o.sigmoid() * c.tanh()
    if weights.projection is not None:
        full = torch.bmm(full.view(D, K * N, -1), weights.projection.mT).view(D, K, N, -1)
    return torch.cat((full, c), dim=-1)


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, cell: CellShape) -> Tensor:
    """``x Wᵀ + b`` as ``[D, T, N, G, H]``."""
    D, T, N, _ = x.shape
    rows = x.reshape(D, T * N, -1)
    if bias is None:
        out = torch.bmm(rows, weight.mT)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out.view(D, T, N, cell.gates, cell.hidden)


def inputs_of(cell: CellShape, x: Tensor, weights: LayerWeights) -> Tensor:
    """What the inputs contribute to the gates, for all steps at once: ``[D, T, N, G, H]``."""
    return projected(x, weights.input, weights.input_bias, cell)


def diagonal(cell: CellShape, values: Tensor, weights: LayerWeights) -> Tensor:
    """Diagonals of the steps' Jacobians ``[D, T, N, S]``; of a projected state, zero."""
    if weights.projection is not None:
        return torch.cat((values.new_zeros((*values.shape[:3], cell.output)), values[..., 1, :]), dim=-1)
    D = len(values)
    w = weights.hidden.view(D, cell.gates, cell.hidden, cell.hidden).diagonal(dim1=-2, dim2=-1)[:, None, None]
    if cell.kind in ("tanh", "relu"):
        return _slope(cell, values[..., 0, :]) * w[..., 0, :]
    if cell.kind == "gru":
        return (values[..., 1:4, :] * w).sum(-2) + values[..., 4, :]
    of_memory = (values[..., 2:5, :] * w[..., :3, :]).sum(-2)
    of_h = values[..., 5, :] * w[..., 3, :] + values[..., 0, :] * of_memory
    return torch.cat((of_h, values[..., 1, :]), dim=-1)
