"""Operations by which a compiled forward sends a value away and a compiled backward has it back.

The two graphs of a compiled step are connected by what the forward returns for the backward. A value that leaves the
device is replaced there by a *ticket*, one number in host memory. Four operations work on it, and Inductor calls them
where they stand between its kernels:

    forward   offload_start(value) ─▶ ticket          the copy out begins, beside the computing
              offload_wait(ticket, value) ─▶ ticket   the device comes after the copy; the value's memory is free
    backward  reload_start(ticket) ─▶ ticket          memory is taken, the copy back begins
              reload_wait(ticket) ─▶ value            the device comes after the copy

They are functions of their operands for the compiler: none writes into an operand or returns a part of one, so no pass
has to know them, in any version of torch. Where copies go is the backend of the eager engine
(`outcore.memory.offload.backends`): pinned host memory below a GPU, a file below a CPU. The bytes of a value travel as
they lie in memory, so that channels-last tensors come back as such.

A ticket's memory is a Python object that holds the copy. When torch drops the last tensor on it (backward is over, or
will never come, because the loss was dropped or an error was raised), the copy goes with it, and its place is free.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from outcore.memory.offload.backends import Backend, OffloadedBuffer, tier_for

__all__ = ["Reservation"]


class _Ticket(bytearray):
    """The memory of one number, and the copy that it stands for."""

    buffer: OffloadedBuffer
    source: torch.Tensor | None = None
    """What is copied out, until the copy is waited for."""


_tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _issue(buffer: OffloadedBuffer, source: torch.Tensor | None = None) -> torch.Tensor:
    ticket = _Ticket(8)
    ticket.buffer, ticket.source = buffer, source
    number = next(_numbers)
    _tickets[number] = ticket
    tensor = torch.frombuffer(ticket, dtype=torch.int64)
    tensor[0] = number
    return tensor


def _buffer_of(ticket: torch.Tensor) -> OffloadedBuffer:
    return _tickets[int(ticket[0])].buffer


class _Store:
    """The off-device memory for the values that compiled steps of one device offload."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asked: dict[int, int] = {}
        self.capacity_bytes = 0
        self.backend: Backend | None = None

    def reserve(self, who: int, size: int) -> None:
        self.asked[who] = size
        if (total := sum(self.asked.values())) > self.capacity_bytes:
            self.capacity_bytes, self.backend = total, None  # the old one lives as long as there is a copy in it

    def release(self, who: int) -> None:
        self.asked.pop(who, None)
        if not self.asked:
            self.capacity_bytes, self.backend = 0, None

    def evict(self, flat: torch.Tensor) -> OffloadedBuffer:
        if self.backend is None:
            self.capacity_bytes = max(self.capacity_bytes, flat.numel())
            self.backend = tier_for(self.device, self.capacity_bytes)
        return self.backend.evict(flat)


_stores: dict[torch.device, _Store] = {}


def _store(device: torch.device) -> _Store:
    if device not in _stores:
        _stores[device] = _Store(device)
    return _stores[device]


class Reservation:
    """Room for what one model sends away, given back when the model is."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self.number = device, 0, next(_numbers)
        weakref.finalize(self, _store(device).release, self.number)

    def at_least(self, size: int) -> None:
        """Have room for so many bytes."""
        if size > self.bytes:
            self.bytes = size
            _store(self.device).reserve(self.number, size)


def _flat(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The bytes of a value with these strides, without a copy if it has them."""
    shape = value.shape
    if any(n != 1 and a != b for n, a, b in zip(shape, value.stride(), stride, strict=True)):
        value = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.detach().as_strided((value.numel(),), (1,)).view(torch.uint8)


@torch.library.custom_op("outcore::offload_start", mutates_args=())
def _offload_start(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    flat = _flat(value, stride)
    return _issue(_store(value.device).evict(flat), flat)


@torch.library.custom_op("outcore::offload_wait", mutates_args=())
def _offload_wait(ticket: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    buffer = _buffer_of(ticket)
    buffer.wait_out()
    return _issue(buffer)


@torch.library.custom_op("outcore::reload_start", mutates_args=())
def _reload_start(ticket: torch.Tensor) -> torch.Tensor:
    buffer = _buffer_of(ticket)
    buffer.fetch()
    return _issue(buffer)


@torch.library.custom_op("outcore::reload_wait", mutates_args=())
def _reload_wait(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    flat = _buffer_of(ticket).bytes_back()
    return flat.view(dtype).as_strided(size, stride)


@_offload_start.register_fake
def _(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@_offload_wait.register_fake
def _(ticket: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@_reload_start.register_fake
def _(ticket: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@_reload_wait.register_fake
def _(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
