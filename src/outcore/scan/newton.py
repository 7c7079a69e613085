"""The forward pass in parallel over time: Newton's method on the states at the boundaries of chunks.

The recurrence is cut into K chunks. Each runs from a guess of its first state, all at once; the guesses are
right when every chunk begins where the one before it ended. With ``F_k`` the map through chunk k and ``M_k``
its Jacobian there, Newton's correction is again a linear recurrence, over K instead of T, and is scanned:

    s_{k+1} = F_k(guess_k) + M_k (s_k - guess_k)

With chunks of one step this is DEER (Lim et al., ICLR 2024); with the diagonal of the Jacobians quasi-DEER
(Gonzalez et al., NeurIPS 2024); without Jacobians Picard's iteration. Longer chunks follow the true dynamics
further between two corrections, so they need fewer iterations and T/L times less memory than DEER. M_k comes
from the same kernel that multiplies out Jacobians in the backward pass.

Whatever M_k is, each iteration makes one more chunk exact from the left, so a wrong Jacobian (diagonal,
damped) costs iterations, never correctness. A network whose Jacobians grow amplifies small errors; then
Newton may not get there within the iterations allowed, and the caller runs the layer sequentially.

On a GPU, where nothing else is asked for, the same idea as in the backward pass comes first: each chunk starts some
steps early and guesses its first state from them (`outcore.scan.kernels.forward`). That is Picard's iteration in one
launch, and needs no look at the result.

The largest correction is the linearised distance to the solution; the states returned were run from guesses
within `tolerance` of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.errors import ScanError
from outcore.machine.free_memory import free_bytes
from outcore.scan.affine import states as affine_states
from outcore.scan.backward import AdjointRecurrence, chunk_products, will_settle
from outcore.scan.cells import CellShape, LayerWeights, diagonal, inputs_of, step_on
from outcore.scan.coefficients import coefficients_from
from outcore.scan.kernels import available, forward
from outcore.scan.linear import linear_recurrence
from outcore.scan.options import Jacobian, Newton
from outcore.scan.report import SolveOutcome
from outcore.scan.workspace import BackwardShape, best_chunk

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_PICARD_FIRST = 6
"""Iterations without Jacobians before Newton's begin, when nothing was asked for; one costs a fraction of
Newton's."""


@dataclass(frozen=True, slots=True)
class NewtonStates:
    """What a parallel forward pass found."""

    states: Tensor | None
    """``[D, T, N, ...]``, hidden states first; none where it did not converge."""
    final: Tensor
    """States after the last step ``[D, N, S]``."""
    outcome: SolveOutcome
    failure: str = ""


def parallel_forward(
    cell: CellShape, x: Tensor, start: Tensor, weights: LayerWeights, lengths: Tensor | None, newton: Newton
) -> NewtonStates:
    """All states of a layer.

    Args:
        cell: the cell.
        x: inputs ``[D, T, N, I]``.
        start: initial states ``[D, N, S]``.
        weights: the parameters.
        lengths: steps of each sequence, where they differ.
        newton: how to iterate.

    Raises:
        ScanError: the Jacobians of so many chunks do not fit in memory.
    """
    D, T, N = x.shape[:3]
    shape = BackwardShape(cell, D, T, N, x.dtype.itemsize, copied=False, on_gpu=x.is_cuda)
    chunk = min(T, newton.chunk or best_chunk(shape, T))
    count = -(-T // chunk)
    _check_memory(cell, D * count * N, x, newton, chunk)
    tolerance = newton.tolerance or _TOLERANCE[x.dtype]
    inputs = inputs_of(cell, x, weights)
    if newton.jacobian is None and newton.damping == 0:
        fused = forward.forward(cell, inputs, weights, start, lengths, chunk, tolerance)
        if fused is not None:
            return NewtonStates(*fused)
    guess = start.new_zeros((D, count, N, cell.state))
    guess[:, 0] = start
    damping, before, jacobian = newton.damping, math.inf, newton.jacobian or "none"
    change = math.inf
    for iteration in range(1, newton.iterations + 1):
        found, ends = _advance(cell, inputs, weights, guess, lengths, chunk)
        new = _corrected(cell, x, weights, found, guess, ends, lengths, chunk, jacobian, damping)
        change = float((new - guess).abs().amax())
        if change <= tolerance:
            return NewtonStates(found, ends[:, -1], _outcome(iteration, change))
        if not math.isfinite(change):
            new = torch.cat((guess[:, :1], ends[:, :-1]), dim=1)
            if not bool(torch.isfinite(new).all()):
                return NewtonStates(
                    None, start, _outcome(iteration, change), f"states overflow in iteration {iteration}"
                )
        if change >= before:
            damping = (1 + damping) / 2
        left = min(_PICARD_FIRST, newton.iterations) - iteration
        slow = not will_settle(before, change, tolerance, left)
        if newton.jacobian is None and jacobian == "none" and slow:
            jacobian, change = "full", math.inf
        guess, before = new, change
    return NewtonStates(
        None,
        start,
        _outcome(newton.iterations, change),
        f"no convergence in {newton.iterations} iterations (correction {change:.1e}, tolerance {tolerance:.1e})",
    )


def _outcome(iterations: int, correction: float) -> SolveOutcome:
    return SolveOutcome("iteration", iterations, _correction=correction)


def _check_memory(cell: CellShape, chunks: int, x: Tensor, newton: Newton, chunk: int) -> None:
    if newton.jacobian in ("none", "diagonal"):
        return
    wide = 1 if available.available(x) and available.fits(cell, x.dtype) else 3 + cell.gates
    needed = chunks * (cell.state + 1) * cell.state * wide * x.dtype.itemsize
    if needed > (free := free_bytes(x.device) // 2):
        longer = chunk * -(-needed // free)
        raise ScanError(
            f"Newton's method over chunks of {chunk} steps needs {needed:,} bytes for Jacobians, and there "
            f'are {free:,}; use Newton(chunk={longer}) or Newton(jacobian="diagonal")'
        )


def _advance(
    cell: CellShape, inputs: Tensor, weights: LayerWeights, guess: Tensor, lengths: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Every state, and the last of each chunk, when the chunks begin at `guess`."""
    if (done := forward.advance(cell, inputs, weights, guess, lengths, chunk)) is not None:
        return done
    D, T, N = inputs.shape[:3]
    found = guess.new_zeros((D, T, N, cell.state))
    state = guess.clone()
    time = torch.arange(T, device=guess.device).unsqueeze(1)
    for j in range(min(chunk, T)):
        here = inputs[:, j::chunk]
        part = state[:, : here.shape[1]]
        new = step_on(cell, part, here, weights)
        if lengths is not None:
            new = torch.where((time[j::chunk] < lengths).unsqueeze(-1), new, part)
        found[:, j::chunk] = new
        state[:, : here.shape[1]] = new
    return found, state


def _corrected(
    cell: CellShape,
    x: Tensor,
    weights: LayerWeights,
    found: Tensor,
    guess: Tensor,
    ends: Tensor,
    lengths: Tensor | None,
    chunk: int,
    jacobian: Jacobian,
    damping: float,
) -> Tensor:
    """Better guesses of the chunks' first states."""
    if jacobian == "none" or guess.shape[1] == 1:
        return torch.cat((guess[:, :1], ends[:, :-1]), dim=1)
    before = torch.cat((guess[:, :1], found[:, :-1]), dim=1)
    before[:, ::chunk] = guess
    h, P = before[..., : cell.output], cell.output
    memory = (before[..., P:], found[..., P:]) if cell.kind == "lstm" else None
    values = coefficients_from(cell, x, h, found[..., :P], memory, weights).values
    if jacobian == "diagonal":
        slope = diagonal(cell, values, weights) * (1 - damping)
        if lengths is not None:
            time = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
            slope = torch.where((time < lengths).unsqueeze(-1), slope, 1)
        slopes = torch.stack([part.prod(1) for part in slope.split(chunk, dim=1)], dim=1)[:, :-1]
        added = ends[:, :-1] - slopes * guess[:, :-1]
        later = linear_recurrence(slopes, added, guess[:, 0], dim=1, check=False)
        return torch.cat((guess[:, :1], later), dim=1)
    zeros = torch.zeros_like(h)
    adjoint = AdjointRecurrence(cell, values, weights.hidden, weights.projection, zeros, guess[:, 0], lengths)
    rows = chunk_products(adjoint, chunk, "full")[:, :-1, :, : cell.state]
    matrices = rows.movedim(1, 0) * (1 - damping)
    added = ends[:, :-1].movedim(1, 0) - (matrices @ guess[:, :-1].movedim(1, 0).unsqueeze(-1)).squeeze(-1)
    return affine_states(matrices, added, guess[:, 0]).movedim(0, 1)
