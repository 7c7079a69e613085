"""How sweeps are cut up on a GPU: into chunks, warm-ups, programs, warps and stages, as measured on an H200."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outcore.scan.kernels.available import power_of_two
from outcore.scan.kernels.weight_gradients import columns

if TYPE_CHECKING:
    from outcore.scan.cells import CellShape

WARM_UPS = {"tanh": (64, 256, 1024), "relu": (64, 256, 1024), "gru": (128, 512, 2048), "lstm": (128, 512, 2048)}
"""Steps that a guess comes from, as many as a wrong start usually takes to fade and more; the last only where the
device waits for the host."""
WARM_UPS_UNSEEN = 2
"""Warm-ups launched when nothing is looked at."""
PROGRAMS = {"tanh": 132 * 4, "relu": 132 * 4, "gru": 132 * 2, "lstm": 132 * 2}
"""Programs that fill a large GPU of 132 multiprocessors; more make the chunks short beside their warm-up."""
WARPS = {"tanh": 2, "relu": 4, "gru": 2, "lstm": 2}
"""Warps of a program up to hidden 32, as measured on an H200."""
FORWARD_PROGRAMS = {"tanh": 132 * 4, "relu": 132 * 4, "gru": 132 * 2, "lstm": 132 * 2}
FORWARD_WARPS = {"tanh": 4, "relu": 4, "gru": 4, "lstm": 4}
"""The same of a parallel forward pass."""
ROWS = 16
"""Sequences per program."""
STAGES = {"tanh": 4, "relu": 4, "gru": 4, "lstm": 4}
"""Steps whose numbers are in shared memory or on their way there at a time, and one."""
_STAGED_BYTES = 2**16
"""Most shared memory they may take, of the 227 KiB that a program has and keeps its weights in as well."""
_WIDEST_SUM = 64
"""States, inputs and one of an RNN whose weights' gradients are summed up in the sweeps."""
_SHORTEST = 16


def warm_ups(cell: CellShape, steps: int, looking: bool) -> tuple[int, ...]:
    """Warm-ups worth a try: the first, and of the others those much shorter than the sequence."""
    first, *more = WARM_UPS[cell.kind] if looking else WARM_UPS[cell.kind][:WARM_UPS_UNSEEN]
    return first, *(warm for warm in more if warm < steps // 4)


def sweep_chunk(
    cell: CellShape, directions: int, steps: int, batch: int, longest: int, *, forward: bool = False
) -> int:
    """Steps per chunk: sweeps want more chunks than products do, which have to be passed through one by one."""
    programs = (FORWARD_PROGRAMS if forward else PROGRAMS)[cell.kind]
    count = max(1, programs // (directions * -(-batch // ROWS)))
    return min(longest, max(_SHORTEST, -(-steps // count)))


def sums(cell: CellShape) -> bool:
    """Whether sweeps sum up the weights' gradients."""
    return cell.gates == 1 and columns(cell) <= _WIDEST_SUM


def sweep_warps(cell: CellShape, dtype: torch.dtype, *, forward: bool = False) -> int:
    """Warps of a program: few, so that they wait for each other little, but enough to hold the weights."""
    size = power_of_two(cell.hidden)
    if size <= 32:
        return (FORWARD_WARPS if forward else WARPS)[cell.kind] if dtype == torch.float32 else 4
    return 4 if cell.gates * size * size * dtype.itemsize <= 2**14 else 8


def sweep_stages(cell: CellShape, dtype: torch.dtype) -> int:
    """How far numbers are copied ahead; see `STAGES`."""
    step = (1 + cell.coefficients) * ROWS * power_of_two(cell.hidden) * dtype.itemsize
    return 1 + max(1, min(STAGES[cell.kind] - 1, _STAGED_BYTES // step))


def product_tile(cell: CellShape, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a product per program, and its warps."""
    size = power_of_two(cell.hidden)
    if size <= 32:
        rows = 16 if cell.kind == "lstm" or cell.state < 16 else 32
        return rows, 1 if dtype == torch.float32 else 4
    return (32, 2) if size == 64 and dtype == torch.float32 else (32, 8)
