"""Where the work runs as Triton kernels, and with which tiles; `None` is the answer where there is none for
the case.

Triton is optional. Where it is missing, or a kernel does not compile on this machine, the same work runs as
batched matrix products; the first failure is said once, as a warning, and the kernel is not tried again.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outcore.scan.backward import Adjoint
    from outcore.scan.cells import Cell, Weights
    from outcore.scan.options import Precision

__all__ = ["advance", "available", "carries", "fits", "linear_states", "products", "sweep"]

_KIND = {"tanh": 0, "relu": 0, "gru": 1, "lstm": 2}
_MOST_REGISTERS = 2**15
"""Weights a program may hold, in 4-byte registers: half of a multiprocessor's."""
_broken: set[str] = set()
_Result = TypeVar("_Result")


@functools.cache
def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(x: Tensor) -> bool:
    """Whether kernels run on this tensor's device."""
    return (x.is_cuda or _interpreted()) and _triton_found()


def _interpreted() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; used to test them without a GPU."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(cell: Cell, dtype: torch.dtype) -> bool:
    """Whether a cell's recurrent weights can be held in the registers of one program."""
    size = _power_of_two(cell.hidden)
    registers = cell.gates * size * size * max(1, dtype.itemsize // 4)
    return not cell.projection and registers <= _MOST_REGISTERS and dtype in (torch.float32, torch.float64)


def _power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _warps(registers: int) -> int:
    """Warps that hold so many numbers at 128 registers a thread; one warp needs no barriers, so as few as
    will do."""
    return min(16, 1 << (-(-registers // (32 * 128)) - 1).bit_length())


def _or_none(name: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result | None]]:
    """Turn a kernel that fails into one that does not exist, and say so once."""

    def wrap(launch: Callable[..., _Result]) -> Callable[..., _Result | None]:
        @functools.wraps(launch)
        def guarded(*args: Any) -> _Result | None:
            if name in _broken:
                return None
            try:
                return launch(*args)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                _broken.add(name)
                warnings.warn(
                    f"the Triton kernel for {name} failed ({type(error).__name__}: {error}); "
                    "batched matrix products are used instead, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None

        return guarded

    return wrap


def sweep(adjoint: Adjoint, chunk: int, carried: Tensor) -> tuple[Tensor, Tensor] | None:
    """Gradients of all states and what leaves each chunk; see `outcore.scan.backward`."""
    if not available(carried) or not fits(adjoint.cell, carried.dtype):
        return None
    return _sweep(adjoint, chunk, carried)


@_or_none("a sweep")
def _sweep(adjoint: Adjoint, chunk: int, carried: Tensor) -> tuple[Tensor, Tensor]:
    totals, out, _ = _follow(adjoint, chunk, carried.contiguous(), _GIVEN)
    return totals, out


def relax(adjoint: Adjoint, chunk: int, previous: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """A sweep from what left the chunks in the previous one (none: from zero), and how much that has changed."""
    if not available(adjoint.values) or not fits(adjoint.cell, adjoint.values.dtype):
        return None
    return _relax(adjoint, chunk, previous)


@_or_none("a sweep")
def _relax(adjoint: Adjoint, chunk: int, previous: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if previous is None:
        return _follow(adjoint, chunk, adjoint.grad_state, _ZERO)
    return _follow(adjoint, chunk, previous, _SHIFTED)


_ZERO, _SHIFTED, _GIVEN = 0, 1, 2


def _follow(adjoint: Adjoint, chunk: int, carried: Tensor, carry: int) -> tuple[Tensor, Tensor, Tensor]:
    D, T, N = adjoint.values.shape[:3]
    S = adjoint.cell.state
    new = torch.empty if adjoint.lengths is None else torch.zeros
    totals = new((D, T, N, S), dtype=carried.dtype, device=carried.device)
    count = -(-T // chunk)
    out = carried.new_empty((D, count, N, S))
    moved = carried.new_empty((2, D, count, N))
    _follow_back(adjoint, chunk, carried, totals, out, moved, carry, rows=0)
    return totals, out, moved


def _follow_back(
    adjoint: Adjoint, chunk: int, carried: Tensor, totals: Tensor, out: Tensor, moved: Tensor, carry: int, rows: int
) -> None:
    from outcore.scan import triton_kernels

    cell = adjoint.cell
    D, T, N = adjoint.values.shape[:3]
    count, size = -(-T // chunk), _power_of_two(cell.hidden)
    places = D * count * N
    triton_kernels.follow_back[(places * max(1, rows),)](
        adjoint.values.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(), carried,
        adjoint.grad_state.contiguous(), carried if adjoint.lengths is None else adjoint.lengths, totals, out, moved,
        T, N, chunk, count, cell.hidden, places,
        KIND=_KIND[cell.kind], RELU=cell.kind == "relu", M=cell.coefficients, G=cell.gates,
        S_PER_H=cell.state // cell.hidden, PACKED=adjoint.lengths is not None, PRODUCTS=rows > 0, CARRY=carry, HP=size,
        num_warps=_warps(cell.gates * size * size * (carried.dtype.itemsize // 4)),
    )  # fmt: skip


def products(adjoint: Adjoint, chunk: int, precision: Precision) -> Tensor | None:
    """The products of the chunks' Jacobians; see `outcore.scan.backward`."""
    x = adjoint.values
    if not available(x) or not fits(adjoint.cell, x.dtype):
        return None
    found = _multiply(adjoint, chunk, precision) if x.dtype == torch.float32 else None
    return found if found is not None else _multiply_rows(adjoint, chunk)


def _empty_rows(adjoint: Adjoint, chunk: int) -> Tensor:
    D, T, N = adjoint.values.shape[:3]
    S = adjoint.cell.state
    return adjoint.values.new_empty((D, -(-T // chunk), N, S + 1, S))


def product_tile(cell: Cell) -> tuple[int, int]:
    """Rows of a product per program, and its warps."""
    size = _power_of_two(cell.hidden)
    if size <= 32:
        return (16 if cell.kind == "lstm" or cell.state < 16 else 32), 1
    return (32, 2) if size == 64 else (32, 8)


@_or_none("products on tensor cores")
def _multiply(adjoint: Adjoint, chunk: int, precision: Precision) -> Tensor:
    from outcore.scan import triton_kernels

    cell, out = adjoint.cell, _empty_rows(adjoint, chunk)
    D, T, N = adjoint.values.shape[:3]
    count, size = out.shape[1], _power_of_two(cell.hidden)
    tile, warps = product_tile(cell)
    triton_kernels.multiply_back[(D * count * N, -(-(cell.state + 1) // tile))](
        adjoint.values.contiguous(), adjoint.hidden.contiguous(), adjoint.grad_output.contiguous(),
        out if adjoint.lengths is None else adjoint.lengths, out,
        T, N, chunk, count, cell.hidden,
        KIND=_KIND[cell.kind], RELU=cell.kind == "relu", M=cell.coefficients, G=cell.gates,
        S_PER_H=cell.state // cell.hidden, PACKED=adjoint.lengths is not None, HP=size, ROWS=tile,
        PRECISION={"full": "tf32x3"}.get(precision, precision), num_warps=warps,
    )  # fmt: skip
    return out


@_or_none("products")
def _multiply_rows(adjoint: Adjoint, chunk: int) -> Tensor:
    out = _empty_rows(adjoint, chunk)
    _follow_back(adjoint, chunk, out, out, out, out, _GIVEN, rows=adjoint.cell.state + 1)
    return out


def carries(adjoint: Adjoint, rows: Tensor) -> Tensor | None:
    """What is carried into the end of every chunk, given the products."""
    if not available(rows) or adjoint.cell.state > 128:
        return None
    return _carries(adjoint, rows)


@_or_none("carries")
def _carries(adjoint: Adjoint, rows: Tensor) -> Tensor:
    from outcore.scan import triton_kernels

    D, K, N = rows.shape[:3]
    S = adjoint.cell.state
    out = rows.new_empty((D, K, N, S))
    size = _power_of_two(S)
    triton_kernels.pass_back[(D * N,)](
        rows.contiguous(), adjoint.grad_state.contiguous(), out, N, K, S,
        SP=size, num_warps=_warps(2 * size * size * (rows.dtype.itemsize // 4)),
    )  # fmt: skip
    return out


def advance(
    cell: Cell, inputs: Tensor, weights: Weights, starts: Tensor, lengths: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor] | None:
    """All chunks forward from given states: every state, and the last of each chunk; see
    `outcore.scan.newton`."""
    if not available(starts) or not fits(cell, starts.dtype):
        return None
    return _advance(cell, inputs, weights, starts, lengths, chunk)


@_or_none("the cell itself")
def _advance(
    cell: Cell, inputs: Tensor, weights: Weights, starts: Tensor, lengths: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    from outcore.scan import triton_kernels

    D, T, N = inputs.shape[:3]
    count, size = starts.shape[1], _power_of_two(cell.hidden)
    new = torch.empty if lengths is None else torch.zeros
    states = new((D, T, N, cell.state), dtype=starts.dtype, device=starts.device)
    starts = starts.contiguous()
    ends = torch.empty_like(starts)
    bias = weights.hidden_bias
    triton_kernels.follow_on[(D * count * N,)](
        inputs.contiguous(), weights.hidden.contiguous(), starts if bias is None else bias.contiguous(),
        starts, starts if lengths is None else lengths, states, ends,
        T, N, chunk, count, cell.hidden,
        KIND=_KIND[cell.kind], RELU=cell.kind == "relu", G=cell.gates, S_PER_H=cell.state // cell.hidden,
        PACKED=lengths is not None, BIAS=bias is not None, LIBRARY=not _interpreted(), HP=size,
        num_warps=_warps(cell.gates * size * size * (starts.dtype.itemsize // 4)),
    )  # fmt: skip
    return states, ends


_BLOCK = 1024
_WORKING = (torch.float32, torch.float64)


def gru_coefficients(from_input: Tensor, from_hidden: Tensor, before: Tensor) -> Tensor | None:
    """The coefficients of a GRU in one pass; see `outcore.scan.cells`."""
    if not available(before) or before.dtype not in _WORKING:
        return None
    return _gru_coefficients(from_input, from_hidden, before)


@_or_none("the gates of a GRU")
def _gru_coefficients(from_input: Tensor, from_hidden: Tensor, before: Tensor) -> Tensor:
    from outcore.scan import triton_kernels

    H, total = before.shape[-1], before.numel()
    out = before.new_empty((*before.shape[:-1], 5, H))
    triton_kernels.gru_values[(-(-total // _BLOCK),)](
        from_input, from_hidden, before.contiguous(), out, total, H, LIBRARY=not _interpreted(), BLOCK=_BLOCK
    )
    return out


def lstm_memory_parts(gates: Tensor) -> tuple[Tensor, Tensor] | None:
    """Factors and additions of the recurrence that an LSTM's memories follow."""
    if not available(gates) or gates.dtype not in _WORKING:
        return None
    return _lstm_memory_parts(gates)


@_or_none("the gates of an LSTM")
def _lstm_memory_parts(gates: Tensor) -> tuple[Tensor, Tensor]:
    from outcore.scan import triton_kernels

    D, T, N, _, H = gates.shape
    f, added = gates.new_empty((D, T, N, H)), gates.new_empty((D, T, N, H))
    triton_kernels.lstm_parts[(-(-f.numel() // _BLOCK),)](
        gates, f, added, f.numel(), H, LIBRARY=not _interpreted(), BLOCK=_BLOCK
    )
    return f, added


def lstm_coefficients(gates: Tensor, memory: Tensor, after: Tensor) -> Tensor | None:
    """The coefficients of an LSTM in one pass, once its memories are known."""
    return _lstm_coefficients(gates, memory, after)


@_or_none("the gates of an LSTM")
def _lstm_coefficients(gates: Tensor, memory: Tensor, after: Tensor) -> Tensor:
    from outcore.scan import triton_kernels

    D, T, N, _, H = gates.shape
    out = gates.new_empty((D, T, N, 6, H))
    total = D * T * N * H
    triton_kernels.lstm_values[(-(-total // _BLOCK),)](
        gates, memory.contiguous(), after.contiguous(), out, total, T, N, H,
        LIBRARY=not _interpreted(), BLOCK=_BLOCK,
    )  # fmt: skip
    return out


_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_TIME_TILE, _CHANNEL_TILE = 64, 16


def linear_states(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor | None:
    """States of the diagonal linear recurrence, time first; see `outcore.scan.linear`."""
    if not available(b) or _REAL.get(b.dtype, b.dtype) not in (torch.float32, torch.float64):
        return None
    return _linear_states(a, b, start, reverse)


@_or_none("the linear recurrence")
def _linear_states(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    T, C = len(b), b[0].numel()
    flat_a, flat_b = a.reshape(T, C).resolve_conj().contiguous(), b.reshape(T, C).resolve_conj().contiguous()
    start = start.reshape(1, C).resolve_conj().contiguous()
    columns = -(-C // _CHANNEL_TILE)
    count = max(1, min(2048 // columns, T // (4 * _TIME_TILE)))
    chunk = -(-T // count)
    if count > 1:
        count = -(-T // chunk)
        ends, factors = flat_b.new_empty((count, C)), flat_b.new_empty((count, C))
        _recur(flat_a, flat_b, start, ends, factors, chunk, reverse, ends_only=True)
        later = torch.empty_like(ends)
        _recur(factors, ends, start, later, factors, count, False, ends_only=False)
        start = torch.cat((start, later[:-1]))
    found = torch.empty_like(flat_b)
    _recur(flat_a, flat_b, start, found, start, chunk, reverse, ends_only=False)
    return found.view(b.shape)


def _recur(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    states: Tensor,
    factors: Tensor,
    chunk: int,
    reverse: bool,
    *,
    ends_only: bool,
) -> None:
    from outcore.scan import triton_kernels

    T, C = b.shape
    parts = [a, b, starts, states, factors]
    kernel = triton_kernels.recur
    if b.is_complex():
        kernel, parts = triton_kernels.recur_complex, [torch.view_as_real(x) for x in parts]
    kernel[(-(-C // _CHANNEL_TILE), -(-T // chunk))](
        *parts, T, chunk, C, REVERSE=reverse, ENDS=ends_only, BT=_TIME_TILE, BC=_CHANNEL_TILE, num_warps=2
    )
