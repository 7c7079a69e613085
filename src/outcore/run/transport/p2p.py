"""Tensors between ranks on the hosts: sends and receives that return at once, and the buffers they use.

A transfer is known by a tag that both ends derive from the program, so any order of posting matches; gloo moves the
bytes on its own thread as soon as both ends are posted. A tensor is sent as its dense memory, in the layout the graph
has for the value, so a channels-last activation arrives channels-last. Between ranks of one host it is written into
shared memory, and a small one between hosts into a socket of our own (`SharedRows`); neither goes through gloo.

Receive buffers come from an arena. A buffer is free when nothing else holds its storage (autograd keeps a received
activation exactly as long as backward needs it), so the arena never grows beyond what is in flight at once, for both
replicas of GEMS together, while torch's own pipelining holds one per micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from outcore.graph import Value
from outcore.graph.strides import contiguous_stride, is_dense, same_layout
from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads
from outcore.run.engine.step_meters import Moment
from outcore.run.transport.shared_memory import SharedRows
from outcore.run.transport.watched_wait import WatchedWait


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a value in memory, at both ends of a transfer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Value) -> TensorLayout:
        """The layout of a graph's value; one with gaps or overlaps is sent contiguously."""
        stride = value.stride if is_dense(value.shape, value.stride) else contiguous_stride(value.shape)
        return cls(value.shape, stride, getattr(torch, value.dtype.removeprefix("torch.")))

    @cached_property
    def nbytes(self) -> int:
        """Size of the memory."""
        return prod(self.shape) * self.dtype.itemsize

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a tensor in this layout, as one row; a copy only where it has another layout."""
        if not same_layout(self.shape, tensor.stride(), self.stride) or tensor.dtype != self.dtype:
            laid = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device)
            tensor = laid.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor in this layout over a row of bytes."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


_SMALL = 1 << 14
"""Bytes that are rather held until the step ends than waited for by a thread."""


class HostRows:
    """Rows of bytes on the host that are reused when nothing holds them."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._rows: dict[int, list[tuple[torch.Tensor, Any, int]]] = {}
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return sum(size * len(rows) for size, rows in self._rows.items())

    def rows(self) -> list[torch.Tensor]:
        """All its rows, in use or not."""
        return [row for rows in self._rows.values() for row, _, _ in rows]

    def take(self, nbytes: int) -> torch.Tensor:
        """A row of that size; it is free again when the last tensor over it is gone."""
        self._used.add(nbytes)
        rows = self._rows.setdefault(nbytes, [])
        for row, storage, idle in rows:
            if torch._C._storage_Use_Count(storage._cdata) == idle:
                return row.view(-1)
        row = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        storage = row.untyped_storage()
        rows.append((row, storage, torch._C._storage_Use_Count(storage._cdata)))
        return row.view(-1)

    def end_step(self) -> None:
        """Drop rows of sizes that a whole step did not use."""
        for nbytes in self._rows.keys() - self._used:
            del self._rows[nbytes]
        self._used.clear()


class IncomingTensor(Protocol):
    """A tensor that is being received."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is received."""


class OutgoingTensor(Protocol):
    """A tensor that is being sent."""

    def ended(self) -> bool:
        """Whether its memory is free again."""

    def finish(self) -> None:
        """Wait until its memory is free again."""


class PointToPoint(Protocol):
    """Moves tensors between ranks."""

    shared_rows: SharedRows

    def send(
        self,
        tensor: torch.Tensor,
        layout: TensorLayout,
        target: int,
        tag: int,
        done: Moved,
        *,
        given_away: bool = False,
    ) -> OutgoingTensor:
        """Post the send of a tensor; of one that is given away nobody needs the memory again."""

    def copies(self, target: int, nbytes: int) -> bool:
        """Whether a send of that size has copied the tensor when it returns, so that it may be changed."""

    def receive(self, layout: TensorLayout, source: int, tag: int, done: Moved) -> IncomingTensor:
        """Post the receive of a tensor."""

    def end_step(self) -> None:
        """Clean up when all transfers of a step are over."""

    def close(self) -> None:
        """Close the transport; nothing is sent or received afterwards."""


Moved = Callable[[str, Moment, Moment], None]
"""Called with the stream of a transfer, when it began and when it was seen to have ended."""


class _Received:
    """Bytes that are being received into a buffer of this rank."""

    def __init__(self, work: Any, flat: torch.Tensor, layout: TensorLayout, done: Moved) -> None:
        self._work, self._flat, self._layout, self._done = work, flat, layout, done
        self._posted = time.perf_counter()

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._done("receive", self._posted, time.perf_counter())
        return self._layout.view(self._flat)


class _FromSharedMemory:
    """A tensor that a rank of this host sends, or a small one of another's."""

    def __init__(
        self,
        source: int,
        tag: int,
        layout: TensorLayout,
        shared_rows: SharedRows,
        done: Moved,
    ) -> None:
        self._source, self._tag, self._layout = source, tag, layout
        self._shared_rows, self._done = shared_rows, done
        self._posted = time.perf_counter()

    def wait(self) -> torch.Tensor:
        flat = self._shared_rows.receive(self._source, self._tag, self._layout.nbytes)
        self._done("receive", self._posted, time.perf_counter())
        return self._layout.view(flat)


class SentRow:
    """A tensor that was copied into shared memory; its name may still have to leave if the pipe was full."""

    def __init__(self, shared_rows: SharedRows) -> None:
        self.ended, self.finish = shared_rows.flush, shared_rows.finish


class _HeldRow:
    """A small row that was given away; gloo says only to a wait that it has left, and until then it costs little."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def ended(self) -> bool:
        """Always False."""
        return False


class SentTensor:
    """A tensor that is being sent, whose end another thread waits for."""

    def __init__(self, task: WorkerTask[None], watched_wait: WatchedWait) -> None:
        self._task, self._watched_wait = task, watched_wait

    def ended(self) -> bool:
        """Whether its memory is free again; raises what went wrong."""
        return self._task.over and self._task.result() is None

    def finish(self) -> None:
        """Wait until the tensor is sent."""
        self._watched_wait.result(self._task)


class _HeldSend(NamedTuple):
    """A row that is being sent, held until it has left."""

    row: torch.Tensor
    work: Any

    def wait(self) -> None:
        self.work.wait()


class HostPointToPoint:
    """Between tensors in host memory, by shared memory or gloo."""

    def __init__(self, group: Any, shared_rows: SharedRows, watched_wait: WatchedWait) -> None:
        self._group, self.shared_rows, self._watched_wait = group, shared_rows, watched_wait
        self.arena = HostRows()
        self._held: list[_HeldSend] = []
        self._waiting = WorkerThreads(1, "outcore send", finish=False)

    def send(
        self,
        tensor: torch.Tensor,
        layout: TensorLayout,
        target: int,
        tag: int,
        done: Moved,
        *,
        given_away: bool = False,
    ) -> OutgoingTensor:
        """Post the send of a tensor; of one that is given away nobody needs the memory again."""
        posted = time.perf_counter()
        if self.copies(target, layout.nbytes):
            self.shared_rows.send(tensor, layout, target, tag)
            done("send", posted, time.perf_counter())
            return SentRow(self.shared_rows)
        flat = layout.flat(tensor).view(torch.uint8)
        work: Any = dist.isend(flat, dst=target, group=self._group, tag=tag)
        if given_away and layout.nbytes <= _SMALL:
            self._held.append(_HeldSend(flat, work))
            done("send", posted, time.perf_counter())
            return _HeldRow(self._finish_held)

        def finish() -> None:
            work.wait()
            done("send", posted, time.perf_counter())

        return SentTensor(self._waiting.submit(finish), self._watched_wait)

    def copies(self, target: int, nbytes: int) -> bool:
        """Whether a send of that size has copied the tensor when it returns: into shared memory, or into a socket."""
        return self.shared_rows.carries(target, nbytes)

    def _finish_held(self) -> None:
        """Wait until all small rows are sent, with one switch of threads."""
        works, self._held = self._held, []
        if works:
            self._watched_wait.result(self._waiting.submit(lambda: [work.wait() for work in works]))

    def receive(self, layout: TensorLayout, source: int, tag: int, done: Moved) -> IncomingTensor:
        """Post the receive of a tensor."""
        if self.shared_rows.carries(source, layout.nbytes):
            return _FromSharedMemory(source, tag, layout, self.shared_rows, done)
        flat = self.arena.take(layout.nbytes)
        work = dist.irecv(flat, src=source, group=self._group, tag=tag)
        return _Received(work, flat, layout, done)

    def end_step(self) -> None:
        """Clean up when all transfers of a step are over."""
        self.arena.end_step()
        self.shared_rows.end_step()

    def close(self) -> None:
        """Close the transport."""
        self._group = None
        self._waiting.close(0.0)  # without waiting for transfers that may never end
        self.shared_rows.close()
