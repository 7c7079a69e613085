"""The backward pass as kernels, with nothing to be looked at between two of them.

*Relaxation by overlap*: each chunk starts from zero some steps after its end and runs through them to guess
what is carried into it; then it goes on through its own steps. The guess is right when it equals what left the
next chunk, and if that holds for all chunks the result is the sequential one. How many steps it takes for a
wrong start to fade below rounding depends on the network: a short warm-up is tried first, then longer ones,
then products of Jacobians, and if those overflow one sequential sweep.

Each of these asks a cell on the device whether the one before it was enough, and returns at once if so. All are
launched therefore (a few empty launches of microseconds), and the pass can be recorded in a CUDA graph and
keeps the host free to run ahead. Only where the device is idle anyway, and waits for the host, is the cell
looked at instead, to spare the launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.scan.kernels import KIND, available, dot_precision, fits, or_none, power_of_two, register_warps
from outcore.scan.report import Outcome

if TYPE_CHECKING:
    from outcore.scan.backward import Adjoint
    from outcore.scan.cells import Cell
    from outcore.scan.options import Precision, Solver

__all__ = [
    "ROWS",
    "compare",
    "device_waits",
    "open_guard",
    "products",
    "solve",
    "sweep_chunk",
    "sweep_warps",
    "warm_ups",
]

WARM_UPS = {"tanh": (64, 256, 1024), "relu": (64, 256, 1024), "gru": (128, 512, 2048), "lstm": (128, 512, 2048)}
"""Steps that a guess comes from, as many as a wrong start usually takes to fade and more; the last only where the
device waits for the host."""
WARM_UPS_UNSEEN = 2
"""Warm-ups launched when nothing is looked at."""
PROGRAMS = {"tanh": 132 * 4, "relu": 132 * 4, "gru": 132 * 2, "lstm": 132 * 2}
"""Programs that fill a large GPU of 132 multiprocessors; more make the chunks short beside their warm-up."""
WARPS = {"tanh": 4, "relu": 4, "gru": 4, "lstm": 4}
"""Warps of a program up to hidden 32, as measured on an H200."""
ROWS = 16
"""Sequences per program."""
_SHORTEST = 16


def solve(
    adjoint: Adjoint, chunk: int, solver: Solver | None, precision: Precision
) -> tuple[Tensor, Tensor, Outcome] | None:
    """Gradients of all states and of the initial ones, and how they were found; see `outcore.scan.backward`."""
    x = adjoint.values
    if not available(x) or not fits(adjoint.cell, x.dtype):
        return None
    return _solve(adjoint, chunk, solver, precision)


@or_none("the backward pass")
def _solve(adjoint: Adjoint, chunk: int, solver: Solver | None, precision: Precision) -> tuple[Tensor, Tensor, Outcome]:
    steps = adjoint.values.shape[1]
    sweeps = _Sweeps(adjoint)
    if chunk >= steps:
        sweeps.run(steps, open_guard(adjoint.values.device))
        return sweeps.totals, sweeps.start, Outcome("sequential", 1)
    looking = device_waits(adjoint.values)
    cells = torch.zeros(4, dtype=torch.int32, device=adjoint.values.device)
    tried = 0
    guard = always = open_guard(adjoint.values.device)
    if solver != "products":
        for warm in warm_ups(adjoint.cell, steps, looking):
            sweeps.overlapped(chunk, warm, guard, cells[tried])
            tried += 1
            if looking and not int(cells[tried - 1]):
                return sweeps.totals, sweeps.start, Outcome("relaxation", tried)
            guard = always if looking else cells[tried - 1]
    rows = _multiply(adjoint, chunk, precision, guard)
    carries = _pass(adjoint, rows, guard, cells[-1])
    sweeps.run(chunk, guard, carries=carries)
    # The product of a chunk may overflow although the gradients do not; one chunk has no products.
    sweeps.run(steps, cells[-1])
    return sweeps.totals, sweeps.start, Outcome.on_device(cells, tried, looked=looking)


def open_guard(device: torch.device) -> Tensor:
    """A cell that lets everything pass."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones((), dtype=torch.int32, device=device)  # what is made in a graph belongs to it
    return _kept(device)


@functools.cache
def _kept(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.int32, device=device)


def device_waits(x: Tensor) -> bool:
    """Whether all that was launched is done; without a GPU, always."""
    if not x.is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.current_stream(x.device).query()


def products(adjoint: Adjoint, chunk: int, precision: Precision) -> Tensor | None:
    """The products of the chunks' Jacobians; see `outcore.scan.backward`."""
    x = adjoint.values
    if not available(x) or not fits(adjoint.cell, x.dtype):
        return None
    return _products(adjoint, chunk, precision)


@or_none("products")
def _products(adjoint: Adjoint, chunk: int, precision: Precision) -> Tensor:
    return _multiply(adjoint, chunk, precision, open_guard(adjoint.values.device))


def warm_ups(cell: Cell, steps: int, looking: bool) -> tuple[int, ...]:
    """Warm-ups worth a try: the first, and of the others those much shorter than the sequence."""
    first, *more = WARM_UPS[cell.kind] if looking else WARM_UPS[cell.kind][:WARM_UPS_UNSEEN]
    return first, *(warm for warm in more if warm < steps // 4)


def sweep_chunk(cell: Cell, directions: int, steps: int, batch: int, longest: int) -> int:
    """Steps per chunk: sweeps want more chunks than products do, which have to be passed through one by one."""
    count = max(1, PROGRAMS[cell.kind] // (directions * -(-batch // ROWS)))
    return min(longest, max(_SHORTEST, -(-steps // count)))


def compare(
    began: Tensor, left: Tensor, sizes: Tensor, guard: Tensor, unsettled: Tensor, *, near: float, far: float,
    changes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Say in the cell `unsettled` whether what chunks k began with is not what left chunks k + 1.

    Args:
        began: ``[D, K, N, S]``.
        left: ``[D, K, N, S]``.
        sizes: numbers of which the largest is taken.
        guard: the cell that has to be set.
        unsettled: the cell.
        near: accepted difference relative to the largest number of a carry.
        far: accepted difference relative to the largest of `sizes`.
        changes: what an earlier comparison of the same tensors returned, to be written again.

    Returns:
        Numbers of which the largest is the largest difference.
    """
    from outcore.scan import sweep_triton_kernels

    D, K, N, S = left.shape
    size = power_of_two(S)
    tile = max(1, 4096 // size)
    programs = max(1, -(-(K - 1) * N // tile))
    if changes is None:
        changes = left.new_empty((D * programs,))
    sweep_triton_kernels.compare[(programs, D)](
        began, left, sizes, guard, unsettled, changes, len(sizes), N, K, near, far,
        S=S, SP=size, ROWS=tile, BLOCK=1024,
    )  # fmt: skip
    return changes


@dataclass(frozen=True, slots=True)
class _Sweeps:
    """Sweeps of one backward pass; a later one overwrites what the one before it found."""

    adjoint: Adjoint
    totals: Tensor
    start: Tensor

    def __init__(self, adjoint: Adjoint) -> None:
        D, T, N = adjoint.values.shape[:3]
        S = adjoint.cell.state
        object.__setattr__(self, "adjoint", adjoint)
        object.__setattr__(self, "totals", adjoint.values.new_empty((D, T, N, S)))
        object.__setattr__(self, "start", adjoint.values.new_empty((D, N, S)))

    def overlapped(self, chunk: int, warm: int, guard: Tensor, unsettled: Tensor) -> None:
        """A sweep that guesses the carries, and whether they were right."""
        D, T, N = self.adjoint.values.shape[:3]
        S = self.adjoint.cell.state
        chunk = sweep_chunk(self.adjoint.cell, D, T, N, chunk)
        count, tiles = -(-T // chunk), -(-N // ROWS)
        guesses, out = (self.totals.new_empty((D, count, N, S)) for _ in range(2))
        sizes = self.totals.new_empty((D * count * tiles,))
        self.run(chunk, guard, warm=warm, found=(guesses, out, sizes))
        eps = torch.finfo(out.dtype).eps
        compare(guesses, out, sizes, guard, unsettled, near=4 * eps, far=eps * eps)

    def run(
        self,
        chunk: int,
        guard: Tensor,
        *,
        warm: int = 0,
        carries: Tensor | None = None,
        found: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """All chunks back, from given carries, or else each after a warm-up."""
        from outcore.scan import sweep_triton_kernels

        adjoint, unused = self.adjoint, self.start
        cell = adjoint.cell
        D, T, N = adjoint.values.shape[:3]
        count, tiles = -(-T // chunk), -(-N // ROWS)
        guesses, out, sizes = found or (unused, unused, unused)
        sweep_triton_kernels.sweep_back[(D * count * tiles,)](
            adjoint.values.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(),
            unused if carries is None else carries, adjoint.grad_state.contiguous(),
            unused if adjoint.lengths is None else adjoint.lengths,
            self.totals, guesses, out, self.start, sizes, guard,
            T, N, chunk, warm, count, tiles, **_sizes(cell), PACKED=adjoint.lengths is not None,
            GIVEN=carries is not None, WATCHED=found is not None,
            PRECISION=_precision("full", adjoint.values), ROWS=ROWS, num_warps=sweep_warps(cell, adjoint.values.dtype),
        )  # fmt: skip


def _sizes(cell: Cell) -> dict[str, Any]:
    return {
        "H": cell.hidden,
        "KIND": KIND[cell.kind],
        "RELU": cell.kind == "relu",
        "M": cell.coefficients,
        "G": cell.gates,
        "S": cell.state,
        "HP": power_of_two(cell.hidden),
    }


def _precision(asked: Precision, x: Tensor) -> str:
    return asked if asked != "full" and x.dtype == torch.float32 else dot_precision(x.dtype)


def sweep_warps(cell: Cell, dtype: torch.dtype) -> int:
    """Warps of a program: few, so that they wait for each other little, but enough to hold the weights."""
    size = power_of_two(cell.hidden)
    if size <= 32:
        return WARPS[cell.kind]
    return 4 if cell.gates * size * size * dtype.itemsize <= 2**14 else 8


def _product_tile(cell: Cell, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a product per program, and its warps."""
    size = power_of_two(cell.hidden)
    if size <= 32:
        rows = 16 if cell.kind == "lstm" or cell.state < 16 else 32
        return rows, 1 if dtype == torch.float32 else 4
    return (32, 2) if size == 64 and dtype == torch.float32 else (32, 8)


def _multiply(adjoint: Adjoint, chunk: int, precision: Precision, guard: Tensor) -> Tensor:
    from outcore.scan import sweep_triton_kernels

    cell, x = adjoint.cell, adjoint.values
    D, T, N = x.shape[:3]
    count = -(-T // chunk)
    out = x.new_empty((D, count, N, cell.state + 1, cell.state))
    tile, warps = _product_tile(cell, x.dtype)
    sweep_triton_kernels.multiply_back[(D * count * N, -(-(cell.state + 1) // tile))](
        x.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(),
        out if adjoint.lengths is None else adjoint.lengths, out, guard,
        T, N, chunk, count, **_sizes(cell), PACKED=adjoint.lengths is not None,
        PRECISION=_precision(precision, x), ROWS=tile, num_warps=warps,
    )  # fmt: skip
    return out


def _pass(adjoint: Adjoint, rows: Tensor, guard: Tensor, overflow: Tensor) -> Tensor:
    """What is carried into the end of every chunk, given the products."""
    from outcore.scan import sweep_triton_kernels

    D, K, N = rows.shape[:3]
    S = adjoint.cell.state
    out = rows.new_empty((D, K, N, S))
    size = power_of_two(S)
    sweep_triton_kernels.pass_back[(D * N,)](
        rows, adjoint.grad_state.contiguous(), out, guard, overflow, N, K,
        S=S, SP=size,
        num_warps=register_warps(2 * size * size * (rows.dtype.itemsize // 4)),
    )  # fmt: skip
    return out
