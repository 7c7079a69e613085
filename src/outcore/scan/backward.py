"""Back-propagation through time over all chunks of a sequence at once.

What has to be solved is linear: the gradient carried out of step t is ``J_tᵀ (carried in + gradient of output
t)``. The T steps are cut into K chunks of L. Inside a chunk the steps run one after the other, but those of
all chunks run together, so a sweep takes L batched steps instead of T:

    time     0 ······ L ······ 2L ······ 3L ······ T
    sweep    <------- <------- <-------- <--------        all at once, each from what is carried into its end

What is carried into the chunks' ends can be found in two ways.

*Products*: the sweep is applied to the rows of an identity matrix, which multiplies the chunk's Jacobians
out. A scan over the K products (`outcore.scan.affine`) gives all carries, and one more sweep the gradients:
the hybrid of BPPSA (sequential below, tree above). Always works; costs about S times the work of a sweep, S
the size of the state.

*Relaxation*: sweep from a guess, hand what comes out of each chunk to the chunk before it, and again, until
nothing changes. If nothing changes, every chunk continues exactly where the next one begins: that *is* the
sequential result. It needs at most K sweeps, and as few as two or three when gradients fade within a chunk,
as they do in most trained recurrences. The rate seen in the first sweeps tells whether it will be quicker
than the products.

On a GPU all of this runs as kernels, where a chunk's first sweep and its guess are one
(`outcore.scan.kernels.backward`); here is the same as batched matrix products, for any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.scan.affine import states
from outcore.scan.cells import CellShape, step_back
from outcore.scan.kernels import backward
from outcore.scan.kernels.weight_gradients import Summed
from outcore.scan.options import Precision, Solver
from outcore.scan.report import SolveOutcome


@dataclass(frozen=True, slots=True)
class WeightGradientInputs:
    """What the gradients of the weights are computed from, beside those of the states."""

    x: Tensor
    """``[D, T, N, I]``."""
    before: Tensor
    """States before the first step ``[D, N, P]``."""
    bias: bool
    totals: bool
    """Whether the gradients of the states are wanted too."""


@dataclass(frozen=True, slots=True)
class AdjointRecurrence:
    """The linear recurrence that the gradients of a layer follow; shapes as in `outcore.scan.cells`."""

    cell: CellShape
    values: Tensor
    """Coefficients ``[D, T, N, M, H]``."""
    hidden: Tensor
    projection: Tensor | None
    grad_output: Tensor
    """Gradients of the outputs ``[D, T, N, P]``, zero where a sequence has ended."""
    grad_state: Tensor
    """Gradients of the final states ``[D, N, S]``."""
    lengths: Tensor | None
    """Steps of each sequence ``[N]``, where they differ."""
    inputs: WeightGradientInputs | None = None
    """Given where the gradients of the weights may be returned as well."""

    def valid(self) -> Tensor | None:
        """Which steps exist, ``[T, N]``."""
        if self.lengths is None:
            return None
        time = torch.arange(self.values.shape[1], device=self.lengths.device)
        return time.unsqueeze(1) < self.lengths


@dataclass(frozen=True, slots=True)
class StateGradients:
    """Gradients of all states, and how they were found."""

    totals: Tensor | None
    """``[D, T, N, S]``; of an LSTM's memory q, of an RNN d·g (see `outcore.scan.cells`). None where only those of the
    weights are wanted, and found."""
    start: Tensor
    """Gradients of the initial states ``[D, N, S]``."""
    outcome: SolveOutcome
    summed: Summed | None = None
    """Gradients of the weights, where they were computed in the same pass."""
    engine: str = "torch"


def solve(
    adjoint: AdjointRecurrence, chunk: int, solver: Solver | None = None, precision: Precision = "full"
) -> StateGradients:
    """Gradients of all states.

    Args:
        adjoint: the recurrence.
        chunk: steps per chunk, L.
        solver: none: relaxation, turning to products when it converges slowly.
        precision: of the products on a GPU.
    """
    if (fused := backward.solve(adjoint, chunk, solver, precision)) is not None:
        return StateGradients(*fused, engine="triton")
    steps = adjoint.values.shape[1]
    count = -(-steps // chunk)
    if count == 1:
        totals, out = _sweep(adjoint, chunk, adjoint.grad_state.unsqueeze(1))
        return StateGradients(totals, out[:, 0], SolveOutcome("sequential", 1))
    sweeps = 0
    recording = adjoint.values.is_cuda and torch.cuda.is_current_stream_capturing()
    if solver != "products" and not recording:  # a CUDA graph cannot look at results; products need no look
        # As measured, about S / 4 sweeps cost less than multiplying out.
        limit = min(count, 64 if solver == "relaxation" else max(3, min(64, adjoint.cell.state // 4)))
        before, previous = math.inf, None
        while sweeps < limit:
            totals, out, change = _relax(adjoint, chunk, previous)
            sweeps += 1
            if change <= 1:
                return StateGradients(totals, out[:, 0], SolveOutcome("relaxation", sweeps))
            if not will_settle(before, change, 1, limit - sweeps):
                break
            before, previous = change, out
            del totals
    rows = chunk_products(adjoint, chunk, precision)
    carries = _carries(adjoint, rows)
    if not recording and not bool(torch.isfinite(carries).all()):
        # The product of a chunk may overflow although the gradients do not; one chunk has no products.
        totals, out = _sweep(adjoint, steps, adjoint.grad_state.unsqueeze(1).contiguous())
        return StateGradients(totals, out[:, 0], SolveOutcome("sequential", sweeps + 1))
    del rows
    totals, out = _sweep(adjoint, chunk, carries)
    return StateGradients(totals, out[:, 0], SolveOutcome("products", sweeps + 1))


def _relax(adjoint: AdjointRecurrence, chunk: int, previous: Tensor | None) -> tuple[Tensor, Tensor, float]:
    """A sweep from what left the chunks in the previous one, and how much that differs from what leaves them now."""
    D, T, N = adjoint.values.shape[:3]
    carries = adjoint.grad_state.new_zeros((D, -(-T // chunk), N, adjoint.cell.state))
    carries[:, -1] = adjoint.grad_state
    if previous is not None:
        carries[:, :-1] = previous[:, 1:]
    totals, out = _sweep(adjoint, chunk, carries)
    new = out[:, 1:]
    return totals, out, _change((new - carries[:, :-1]).abs().amax(-1), new.abs().amax(-1))


def _change(change: Tensor, size: Tensor) -> float:
    """Largest change of a carry relative to its rounding: 4 ulp of its largest number.

    Carries that are negligible beside the largest (below the square of the precision) count as converged.
    """
    eps = torch.finfo(change.dtype).eps
    return float((change / (4 * eps * size + eps * eps * size.amax())).nan_to_num(0).amax())


def will_settle(before: float, change: float, goal: float, left: int) -> bool:
    """Whether the change, falling as it just did, reaches the goal in the sweeps left."""
    if before == math.inf:
        return math.isfinite(change)
    return change < before and math.log(goal / change) / math.log(change / before) <= left


def _sweep(adjoint: AdjointRecurrence, chunk: int, carries: Tensor) -> tuple[Tensor, Tensor]:
    """Sweep all chunks from given carries ``[D, K, N, S]``: gradients of all states, and what leaves each
    chunk."""
    cell, valid = adjoint.cell, adjoint.valid()
    D, T, N = adjoint.values.shape[:3]
    totals = adjoint.values.new_zeros((D, T, N, cell.state))
    rows = carries.unsqueeze(-2).clone()
    for j in reversed(range(min(chunk, T))):
        values = adjoint.values[:, j::chunk]
        part = rows[:, : values.shape[1]]
        part[..., 0, : cell.output] += adjoint.grad_output[:, j::chunk]
        new, total = step_back(cell, part, values, adjoint.hidden, adjoint.projection)
        if valid is not None:
            here = valid[j::chunk, :, None, None]
            new, total = torch.where(here, new, part), torch.where(here, total, 0)
        totals[:, j::chunk] = total.squeeze(-2)
        rows[:, : values.shape[1]] = new
    return totals, rows.squeeze(-2)


def chunk_products(adjoint: AdjointRecurrence, chunk: int, precision: Precision) -> Tensor:
    """What each chunk does to a carried gradient: row i for the i-th unit vector, the last row for zero."""
    if (found := backward.products(adjoint, chunk, precision)) is not None:
        return found
    cell, valid, S = adjoint.cell, adjoint.valid(), adjoint.cell.state
    D, T, N = adjoint.values.shape[:3]
    rows = adjoint.values.new_zeros((D, -(-T // chunk), N, S + 1, S))
    rows[..., :S, :] = torch.eye(S, dtype=rows.dtype, device=rows.device)
    for j in reversed(range(min(chunk, T))):
        values = adjoint.values[:, j::chunk]
        part = rows[:, : values.shape[1]]
        part[..., S, : cell.output] += adjoint.grad_output[:, j::chunk]
        new, _ = step_back(cell, part, values, adjoint.hidden, adjoint.projection)
        rows[:, : values.shape[1]] = new if valid is None else torch.where(valid[j::chunk, :, None, None], new, part)
    return rows


def _carries(adjoint: AdjointRecurrence, rows: Tensor) -> Tensor:
    """Gradients carried into the end of every chunk ``[D, K, N, S]``: a scan over the chunks' products."""
    S = adjoint.cell.state
    later = rows[:, 1:].movedim(1, 0).flip(0)
    found = states(later[..., :S, :].mT, later[..., S, :], adjoint.grad_state)
    return found.flip(0).movedim(0, 1).contiguous()
