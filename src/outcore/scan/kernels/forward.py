"""The forward pass as kernels; see `outcore.scan.newton`.

`forward` finds all states without anything being looked at on the way, as `outcore.scan.kernels.backward` does for
gradients: each chunk guesses its first state by a warm-up over the steps before it, a kernel compares the guesses
with what the chunks ended with, and longer warm-ups and at last one sequential sweep follow, which return at
once where that was enough. Where the device is idle and the guesses stay wrong, Newton's method takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outcore.scan.kernels.available import KIND, available, dot_precision, fits, interpreted, or_none, power_of_two
from outcore.scan.kernels.backward import compare, device_waits, open_guard
from outcore.scan.kernels.backward_sizes import ROWS, sweep_chunk, sweep_stages, sweep_warps, warm_ups
from outcore.scan.report import SolveOutcome

if TYPE_CHECKING:
    from outcore.scan.cells import CellShape, LayerWeights


def advance(
    cell: CellShape, inputs: Tensor, weights: LayerWeights, starts: Tensor, lengths: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor] | None:
    """All chunks forward from given states ``[D, K, N, S]``: every state, and the last of each chunk."""
    if not available(starts) or not fits(cell, starts.dtype):
        return None
    return _advance(cell, inputs, weights, starts, lengths, chunk)


@or_none("the cell itself")
def _advance(
    cell: CellShape, inputs: Tensor, weights: LayerWeights, starts: Tensor, lengths: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    D, T, N = inputs.shape[:3]
    states = starts.new_empty((D, T, N, cell.state))
    starts, ends = starts.contiguous(), torch.empty_like(starts, memory_format=torch.contiguous_format)
    unused, final = torch.empty_like(ends), starts.new_empty((D, N, cell.state))
    guard = open_guard(starts.device)
    _run(cell, inputs, weights, starts, lengths, states, final, chunk, 0, guard, (unused, ends), given=True)
    return states, ends


def forward(
    cell: CellShape,
    inputs: Tensor,
    weights: LayerWeights,
    start: Tensor,
    lengths: Tensor | None,
    chunk: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, SolveOutcome] | None:
    """All hidden states ``[D, T, N, H]``, the last states ``[D, N, S]``, and how they were found; none where
    something else is to be tried.

    Args:
        cell: the cell.
        inputs: what the inputs contribute to the gates ``[D, T, N, G, H]``.
        weights: the parameters.
        start: initial states ``[D, N, S]``.
        lengths: steps of each sequence, where they differ.
        chunk: most steps per chunk.
        tolerance: largest accepted difference between a guess and what it should be.
    """
    if not available(start) or not fits(cell, start.dtype):
        return None
    return _forward(cell, inputs, weights, start.contiguous(), lengths, chunk, tolerance)


@or_none("the parallel forward pass")
def _forward(
    cell: CellShape,
    inputs: Tensor,
    weights: LayerWeights,
    start: Tensor,
    lengths: Tensor | None,
    chunk: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, SolveOutcome] | None:
    D, T, N = inputs.shape[:3]
    S = cell.state
    states, final = start.new_empty((D, T, N, cell.hidden)), start.new_empty((D, N, S))
    looking = device_waits(start)
    cells = torch.zeros(4, dtype=torch.int32, device=start.device)
    guard = always = open_guard(start.device)
    chunk = sweep_chunk(cell, D, T, N, chunk, forward=True)
    count, tried = -(-T // chunk), 0
    guesses, ends = (start.new_empty((D, count, N, S)) for _ in range(2))
    one, changes = start.new_ones((1,)), None
    for warm in warm_ups(cell, T, looking):
        _run(cell, inputs, weights, start, lengths, states, final, chunk, warm, guard, (guesses, ends))
        changes = compare(ends, guesses, one, guard, cells[tried], near=0.0, far=tolerance, changes=changes)
        tried += 1
        if looking and not int(cells[tried - 1]):
            return states, final, SolveOutcome("relaxation", tried, _changes=changes)
        guard = always if looking else cells[tried - 1]
    if looking:
        return None
    _run(cell, inputs, weights, start, lengths, states, final, T, 0, guard, None)
    return states, final, SolveOutcome.on_device(cells, tried, looked=False, otherwise="sequential", changes=changes)


def _run(
    cell: CellShape,
    inputs: Tensor,
    weights: LayerWeights,
    starts: Tensor,
    lengths: Tensor | None,
    states: Tensor,
    final: Tensor,
    chunk: int,
    warm: int,
    guard: Tensor,
    found: tuple[Tensor, Tensor] | None,
    *,
    given: bool = False,
) -> None:
    from outcore.kernels.recurrent import forward

    D, T, N = inputs.shape[:3]
    count, tiles = -(-T // chunk), -(-N // ROWS)
    guesses, ends = found or (final, final)
    bias = weights.hidden_bias
    forward.sweep_on[(D * count * tiles,)](
        inputs.contiguous(), weights.hidden.contiguous(), starts if bias is None else bias.contiguous(), starts,
        starts if lengths is None else lengths, states, guesses, ends, final, guard,
        T, N, chunk, warm, count, tiles,
        H=cell.hidden, KIND=KIND[cell.kind], RELU=cell.kind == "relu", G=cell.gates, S=cell.state,
        WRITTEN=states.shape[-1], PACKED=lengths is not None, BIAS=bias is not None, GIVEN=given,
        WATCHED=found is not None, LIBRARY=not interpreted(),
        PRECISION=dot_precision(starts.dtype), HP=power_of_two(cell.hidden), ROWS=ROWS,
        STAGES=sweep_stages(cell, starts.dtype), num_warps=sweep_warps(cell, starts.dtype, forward=True),
    )  # fmt: skip
