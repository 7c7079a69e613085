"""How the ranks of a grid talk: numbered messages between two of them.

A message is named by its two ends and a number that both derive from the layout. Sends and receives return at once;
only `wait` waits. All ranks post and wait in the order of the network's nodes, so no two can wait for each other.

`ThreadRanks` are ranks that are threads of one process. They run the code that real ranks run, with queues in place of
a network, and are the oracle of the tests.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outcore.errors import OutcoreError

__all__ = ["Communicator", "IncomingPart", "ThreadRanks", "gather_rows", "run_on_threads"]


class IncomingPart(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""


class Communicator(Protocol):
    """One rank's end of all messages."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, target: int, number: int) -> None:
        """Send a tensor; it may be changed as soon as this returns."""

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, number: int
    ) -> IncomingPart:
        """Receive a tensor."""


def gather_rows(comm: Communicator, row: torch.Tensor, number: int) -> list[torch.Tensor]:
    """A small tensor of equal shape from every rank, by rank."""
    coming: dict[int, IncomingPart] = {}
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for other in others:
        coming[other] = comm.receive(tuple(row.shape), row.dtype, row.device, other, number)
    for other in others:
        comm.send(row, other, number)
    return [row if rank == comm.rank else coming[rank].wait() for rank in range(comm.size)]


_WAIT_S = 120.0


@dataclass
class ThreadRanks:
    """The queues between ranks that are threads."""

    size: int

    def __post_init__(self) -> None:
        self._queues: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.failed = threading.Event()
        self.sent_bytes = 0
        self.messages = 0

    def line(self, source: int, target: int, number: int) -> queue.SimpleQueue[torch.Tensor]:
        """The messages of one name."""
        with self._lock:
            return self._queues[source, target, number]

    def count(self, tensor: torch.Tensor) -> None:
        """Add a message to what was sent."""
        with self._lock:
            self.sent_bytes += tensor.numel() * tensor.element_size()
            self.messages += 1

    def leftovers(self) -> int:
        """Messages that nobody received."""
        return sum(line.qsize() for line in self._queues.values())


@dataclass
class _ThreadRank:
    ranks: ThreadRanks
    rank: int

    @property
    def size(self) -> int:
        return self.ranks.size

    def send(self, tensor: torch.Tensor, target: int, number: int) -> None:
        self.ranks.count(tensor)
        self.ranks.line(self.rank, target, number).put(tensor.detach().clone(memory_format=torch.contiguous_format))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, number: int
    ) -> IncomingPart:
        return _Queued(self.ranks, self.ranks.line(source, self.rank, number), shape, dtype)


@dataclass
class _Queued:
    ranks: ThreadRanks
    line: queue.SimpleQueue[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        waited = 0.0
        while True:
            try:
                got = self.line.get(timeout=0.2)
            except queue.Empty:
                waited += 0.2
                if self.ranks.failed.is_set() or waited > _WAIT_S:
                    raise OutcoreError("another rank has failed, or sent nothing") from None
                continue
            if (tuple(got.shape), got.dtype) != (self.shape, self.dtype):
                raise OutcoreError(f"got {tuple(got.shape)} {got.dtype}, expected {self.shape} {self.dtype}")
            return got


def run_on_threads(size: int, function: Callable[[Any], Any]) -> tuple[list[Any], ThreadRanks]:
    """Run a function of a communicator on so many ranks; returns what each returned, and the queues."""
    ranks = ThreadRanks(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = function(_ThreadRank(ranks, rank))
        except BaseException as error:
            errors.append(error)
            ranks.failed.set()

    threads = [threading.Thread(target=one, args=(rank,), name=f"part {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, ranks
