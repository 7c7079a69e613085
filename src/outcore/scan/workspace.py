"""How much memory a backward pass takes, before it runs, and how the sequence is cut to stay within a bound.

Two cuts. *Segments* bound what grows with time (coefficients, gradients of gates): they are handled one after
the other from the end of the sequence, so a smaller bound costs depth, not exactness. Inside a segment,
*chunks* bound the products of Jacobians, K of them of S x (S + 1) numbers each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from outcore.errors import ScanError
from outcore.scan.cells import CellShape
from outcore.scan.kernels import gates as gate_kernels
from outcore.scan.kernels.backward_sizes import ROWS, sums, sweep_chunk
from outcore.scan.kernels.weight_gradients import columns, partial_sums

SHORTEST_SEGMENT = 32
GPU_PROGRAMS = 132 * 16
"""Chunks times sequences that keep a large GPU busy: 16 warps on each of its 132 multiprocessors."""

# Numbers per step, sequence and hidden unit at the peak of a phase; tests/scan/test_workspace.py counts them.
_WHILE_COEFFICIENTS = {"tanh": 0, "relu": 0, "gru": 18, "lstm": 24}
_WHILE_COEFFICIENTS_FUSED = {"tanh": 0, "relu": 0, "gru": 5, "lstm": 11}
_KEPT_COEFFICIENTS = {"tanh": 0, "relu": 0, "gru": 5, "lstm": 6}
_GATE_TENSORS = {"tanh": 0, "relu": 0, "gru": 6, "lstm": 4}


@dataclass(frozen=True, slots=True)
class BackwardShape:
    """What the size of a backward pass depends on."""

    cell: CellShape
    directions: int
    steps: int
    batch: int
    itemsize: int
    copied: bool
    """Whether inputs and outputs are copied first: two directions, packed sequences, or another precision."""
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """How a sequence is cut, and the peak it leads to."""

    segment: int
    """Steps per segment."""
    chunk: int
    """Steps per chunk."""
    bytes: int


def peak_bytes(shape: BackwardShape, segment: int, chunk: int, *, fused: bool) -> int:
    """The most bytes alive beyond what forward saved and the gradients that backward returns for the parameters."""
    cell = shape.cell
    H, P, S, projected = cell.hidden, cell.output, cell.state, 1 if cell.projection else 0
    D, steps = shape.directions, min(segment, shape.steps)
    rows, whole = D * steps * shape.batch, D * shape.steps * shape.batch
    of_input = whole * cell.input
    kept = of_input + (whole * (cell.input + 2 * P) if shape.copied else 0)
    apart = rows * cell.input if shape.copied or steps < shape.steps else 0
    base = rows * (_KEPT_COEFFICIENTS[cell.kind] + projected) * H
    if fused and gate_kernels.narrow(cell):
        coefficients = rows * _WHILE_COEFFICIENTS_FUSED[cell.kind] * H
    else:
        shifted = 0 if cell.kind in ("tanh", "relu") else P
        coefficients = rows * (shifted + _WHILE_COEFFICIENTS[cell.kind] * H)
    count = -(-steps // chunk)
    carries = 4 * count * D * shape.batch * S
    products = carries + count * D * shape.batch * _numbers_per_chunk(cell, fused=fused) if count > 1 else 0
    if fused:
        most = -(-steps // sweep_chunk(cell, D, steps, shape.batch, chunk))
        guesses = 2 * most * D * shape.batch * S
        shares = partial_sums(cell, D, steps * shape.batch)
        if sums(cell):
            guesses += most * D * -(-shape.batch // ROWS) * H * columns(cell)
            shares = 0
        products = max(products + guesses, shares)
    solving = base + rows * S + products
    gates = base + rows * (S + (_GATE_TENSORS[cell.kind] + projected) * H) + apart
    restoring = 2 * of_input // D if shape.copied else 0
    weights = 3 * D * cell.gates * H * (cell.input + P + 2)
    numbers = kept + weights + max(coefficients, solving, gates, restoring)
    return math.ceil(1.02 * numbers) * shape.itemsize


def _numbers_per_chunk(cell: CellShape, *, fused: bool) -> int:
    """Numbers alive while Jacobians are multiplied: the product alone in a kernel, else what its steps make too."""
    S = cell.state
    if fused:
        return (S + 1) * S
    wide = {"tanh": 4.8, "relu": 4.8, "gru": 6.0, "lstm": 2.6 + 10.4 * cell.hidden / S}[cell.kind]
    return math.ceil((S + 1) * S * wide)


@functools.lru_cache(maxsize=256)
def cut(shape: BackwardShape, limit: int | None, chunk: int | None, *, fused: bool) -> SequenceCut:
    """Segments and chunks that stay within `limit` bytes, as few segments as that allows.

    Raises:
        ScanError: even the shortest segments need more; says how much.
    """
    segment = shape.steps
    while True:
        length = chunk or best_chunk(shape, segment)
        needed = peak_bytes(shape, segment, length, fused=fused)
        while chunk is None and limit is not None and needed > limit and length < segment:
            length = min(segment, length * 2)
            needed = peak_bytes(shape, segment, length, fused=fused)
        if limit is None or needed <= limit:
            return SequenceCut(segment, length, needed)
        if segment <= SHORTEST_SEGMENT:
            raise ScanError(
                f"the backward pass of this {shape.cell.kind} layer (hidden {shape.cell.hidden}, batch "
                f"{shape.batch}, {shape.steps} steps) needs at least {needed:,} bytes of workspace and may "
                f"take {limit:,}; allow Options(memory={needed}), make the batch smaller, or use "
                'Options(backward="torch")'
            )
        segment = max(SHORTEST_SEGMENT, -(-segment // 2))


def best_chunk(shape: BackwardShape, steps: int) -> int:
    """Steps per chunk when nothing bounds it: enough chunks to fill the device, not so many that they get
    short."""
    if shape.on_gpu:
        count = max(1, GPU_PROGRAMS // (shape.directions * shape.batch))
        return min(steps, max(16, -(-steps // count)))
    return max(1, math.ceil(math.sqrt(steps)))
