"""The backward pass as kernels, without a host synchronisation between two of them.

*Relaxation by overlap*: each chunk starts from zero some steps after its end and runs through them to guess what is
carried into it; then it goes on through its own steps. The guess is right when it equals what left the next chunk, and
if that holds for all chunks the result is the sequential one. How many steps it takes for a wrong start to fade below
rounding depends on the network: a short warm-up is tried first, then longer ones, then products of Jacobians, and if
those overflow one sequential sweep.

Each of these reads a flag on the device that says whether the one before it was enough, and returns at once if so. All
are launched therefore (a few empty launches of microseconds), and the pass can be recorded in a CUDA graph and keeps
the host free to run ahead. Only where the device is idle anyway, and waits for the host, is the flag read instead, to
save the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.scan.kernels.available import KIND, available, dot_precision, fits, or_none, power_of_two, register_warps
from outcore.scan.kernels.backward_sizes import (
    ROWS,
    STAGES,
    product_tile,
    sums,
    sweep_chunk,
    sweep_stages,
    sweep_warps,
    warm_ups,
)
from outcore.scan.kernels.weight_gradients import Summed, added_up, columns
from outcore.scan.report import SolveOutcome

if TYPE_CHECKING:
    from outcore.scan.backward import AdjointRecurrence
    from outcore.scan.cells import CellShape
    from outcore.scan.options import Precision, Solver


def solve(
    adjoint: AdjointRecurrence, chunk: int, solver: Solver | None, precision: Precision
) -> tuple[Tensor | None, Tensor, SolveOutcome, Summed | None] | None:
    """Gradients of all states and of the initial ones, how they were found, and the gradients of the weights where
    they came with them; see `outcore.scan.backward`."""
    x = adjoint.values
    if not available(x) or not fits(adjoint.cell, x.dtype):
        return None
    return _solve(adjoint, chunk, solver, precision)


@or_none("the backward pass")
def _solve(
    adjoint: AdjointRecurrence, chunk: int, solver: Solver | None, precision: Precision
) -> tuple[Tensor | None, Tensor, SolveOutcome, Summed | None]:
    steps = adjoint.values.shape[1]
    sweeps = _Sweeps.of(adjoint, chunk)
    if chunk >= steps:
        sweeps.run(steps, open_guard(adjoint.values.device))
        return sweeps.found(SolveOutcome("sequential", 1))
    looking = device_waits(adjoint.values)
    cells = torch.zeros(4, dtype=torch.int32, device=adjoint.values.device)
    tried = 0
    guard = always = open_guard(adjoint.values.device)
    if solver != "products":
        for warm in warm_ups(adjoint.cell, steps, looking):
            sweeps.overlapped(chunk, warm, guard, cells[tried])
            tried += 1
            if looking and not int(cells[tried - 1]):
                return sweeps.found(SolveOutcome("relaxation", tried))
            guard = always if looking else cells[tried - 1]
    rows = _multiply(adjoint, chunk, precision, guard)
    carries = _pass(adjoint, rows, guard, cells[-1])
    sweeps.run(chunk, guard, carries=carries)
    # The product of a chunk may overflow although the gradients do not; one chunk has no products.
    sweeps.run(steps, cells[-1])
    return sweeps.found(SolveOutcome.on_device(cells, tried, looked=looking))


_open: dict[torch.device, Tensor] = {}


def open_guard(device: torch.device) -> Tensor:
    """A flag that lets everything run."""
    if device not in _open:
        cell = torch.ones((), dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return cell  # what is made in a graph belongs to it
        _open[device] = cell
    return _open[device]


def device_waits(x: Tensor) -> bool:
    """Whether all that was launched is done; without a GPU, always."""
    if not x.is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.current_stream(x.device).query()


def products(adjoint: AdjointRecurrence, chunk: int, precision: Precision) -> Tensor | None:
    """The products of the chunks' Jacobians; see `outcore.scan.backward`."""
    x = adjoint.values
    if not available(x) or not fits(adjoint.cell, x.dtype):
        return None
    return _products(adjoint, chunk, precision)


@or_none("products")
def _products(adjoint: AdjointRecurrence, chunk: int, precision: Precision) -> Tensor:
    return _multiply(adjoint, chunk, precision, open_guard(adjoint.values.device))


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
    from outcore.kernels.recurrent import backward

    D, K, N, S = left.shape
    size = power_of_two(S)
    tile = max(1, 4096 // size)
    programs = max(1, -(-(K - 1) * N // tile))
    if changes is None:
        changes = left.new_empty((D * programs,))
    backward.compare[(programs, D)](
        began, left, sizes, guard, unsettled, changes, len(sizes), N, K, near, far,
        S=S, SP=size, ROWS=tile, BLOCK=1024,
    )  # fmt: skip
    return changes


@dataclass(frozen=True, slots=True)
class _Sweeps:
    """Sweeps of one backward pass; a later one overwrites what the one before it found."""

    adjoint: AdjointRecurrence
    totals: Tensor | None
    start: Tensor
    parts: Tensor | None
    """Shares of the sums that the weights' gradients are."""

    @classmethod
    def of(cls, adjoint: AdjointRecurrence, chunk: int) -> _Sweeps:
        """Sweeps over chunks of at most so many steps."""
        cell, x = adjoint.cell, adjoint.values
        D, T, N = x.shape[:3]
        summed = adjoint.inputs is not None and sums(cell)
        stored = adjoint.inputs is None or adjoint.inputs.totals or not summed
        shares = -(-T // sweep_chunk(cell, D, T, N, chunk)) * -(-N // ROWS)
        return cls(
            adjoint,
            x.new_empty((D, T, N, cell.state)) if stored else None,
            x.new_empty((D, N, cell.state)),
            x.new_empty((D, shares, cell.hidden, columns(cell))) if summed else None,
        )

    def found(self, outcome: SolveOutcome) -> tuple[Tensor | None, Tensor, SolveOutcome, Summed | None]:
        """What `solve` returns."""
        inputs, parts = self.adjoint.inputs, self.parts
        summed = None if inputs is None or parts is None else added_up(self.adjoint.cell, parts, inputs.bias)
        return self.totals, self.start, outcome, summed

    def overlapped(self, chunk: int, warm: int, guard: Tensor, unsettled: Tensor) -> None:
        """A sweep that guesses the carries, and whether they were right."""
        D, T, N = self.adjoint.values.shape[:3]
        S = self.adjoint.cell.state
        chunk = sweep_chunk(self.adjoint.cell, D, T, N, chunk)
        count, tiles = -(-T // chunk), -(-N // ROWS)
        guesses, out = (self.start.new_empty((D, count, N, S)) for _ in range(2))
        sizes = self.start.new_empty((D * count * tiles,))
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
        from outcore.kernels.recurrent import backward

        adjoint, unused = self.adjoint, self.start
        cell = adjoint.cell
        D, T, N = adjoint.values.shape[:3]
        count, tiles = -(-T // chunk), -(-N // ROWS)
        guesses, out, sizes = found or (unused, unused, unused)
        inputs, parts = adjoint.inputs, self.parts
        x, before = (unused, unused) if inputs is None else (inputs.x.contiguous(), inputs.before.contiguous())
        backward.sweep_back[(D * count * tiles,)](
            adjoint.values.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(),
            unused if carries is None else carries, adjoint.grad_state.contiguous(),
            unused if adjoint.lengths is None else adjoint.lengths,
            x, before, unused if self.totals is None else self.totals, guesses, out, self.start, sizes,
            unused if parts is None else parts, guard,
            T, N, chunk, warm, count, tiles, 0 if parts is None else parts.shape[1], **_sizes(cell), IN=cell.input,
            PACKED=adjoint.lengths is not None, GIVEN=carries is not None, WATCHED=found is not None,
            STORED=self.totals is not None, SUMMED=parts is not None, RIGHT=columns(cell),
            PRECISION=_precision("full", adjoint.values), ROWS=ROWS, STAGES=sweep_stages(cell, adjoint.values.dtype),
            num_warps=sweep_warps(cell, adjoint.values.dtype),
        )  # fmt: skip


def _sizes(cell: CellShape) -> dict[str, Any]:
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


def _multiply(adjoint: AdjointRecurrence, chunk: int, precision: Precision, guard: Tensor) -> Tensor:
    from outcore.kernels.recurrent import backward

    cell, x = adjoint.cell, adjoint.values
    D, T, N = x.shape[:3]
    count = -(-T // chunk)
    out = x.new_empty((D, count, N, cell.state + 1, cell.state))
    tile, warps = product_tile(cell, x.dtype)
    backward.multiply_back[(D * count * N, -(-(cell.state + 1) // tile))](
        x.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(),
        out if adjoint.lengths is None else adjoint.lengths, out, guard,
        T, N, chunk, count, **_sizes(cell), PACKED=adjoint.lengths is not None,
        PRECISION=_precision(precision, x), ROWS=tile, STAGES=STAGES[cell.kind], num_warps=warps,
    )  # fmt: skip
    return out


def _pass(adjoint: AdjointRecurrence, rows: Tensor, guard: Tensor, overflow: Tensor) -> Tensor:
    """What is carried into the end of every chunk, given the products."""
    from outcore.kernels.recurrent import backward

    D, K, N = rows.shape[:3]
    S = adjoint.cell.state
    out = rows.new_empty((D, K, N, S))
    size = power_of_two(S)
    backward.pass_back[(D * N,)](
        rows, adjoint.grad_state.contiguous(), out, guard, overflow, N, K,
        S=S, SP=size,
        num_warps=register_warps(2 * size * size * (rows.dtype.itemsize // 4)),
    )  # fmt: skip
    return out
