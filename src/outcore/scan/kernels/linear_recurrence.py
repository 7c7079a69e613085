"""The diagonal linear recurrence as a kernel: chunks of time, twice over; see `outcore.scan.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from outcore.scan.kernels.available import available, or_none

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_TIME_TILE, _CHANNEL_TILE = 64, 16


def linear_states(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor | None:
    """States of the diagonal linear recurrence, time first; see `outcore.scan.linear`."""
    if not available(b) or _REAL.get(b.dtype, b.dtype) not in (torch.float32, torch.float64):
        return None
    return _linear_states(a, b, start, reverse)


@or_none("the linear recurrence")
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
    from outcore.kernels.recurrent import linear_recurrence

    T, C = b.shape
    parts = [a, b, starts, states, factors]
    kernel = linear_recurrence.recur
    if b.is_complex():
        kernel, parts = linear_recurrence.recur_complex, [torch.view_as_real(x) for x in parts]
    kernel[(-(-C // _CHANNEL_TILE), -(-T // chunk))](
        *parts, T, chunk, C, REVERSE=reverse, ENDS=ends_only, BT=_TIME_TILE, BC=_CHANNEL_TILE, num_warps=2
    )
