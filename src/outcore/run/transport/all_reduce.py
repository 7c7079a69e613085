"""A row of numbers added up over the ranks that hold copies of a stage, while other things run.

Over any group gloo does it, on the hosts. Two ranks of one host, as the replicas of GEMS are, give each other their
rows through shared memory and both add: a + b and b + a are the same bits, so copies stay equal.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from outcore.run.transport.shared_memory import SharedRows
from outcore.run.transport.watched_wait import WatchedWait


class AllReduce(Protocol):
    """An all-reduce under way."""

    def wait(self) -> None:
        """Wait until the row holds the sum."""


class GlooAllReduce:
    """Over a process group, through the host."""

    def __init__(self, row: torch.Tensor, group: Any, watched_wait: WatchedWait) -> None:
        self._row, self._host, self._watched_wait = row, row.cpu(), watched_wait
        self._work: Any = dist.all_reduce(self._host, group=group, async_op=True)

    def wait(self) -> None:
        """Wait until the row holds the sum."""
        self._watched_wait.wait(self._work)
        if self._host is not self._row:
            self._row.copy_(self._host)


class SharedMemoryAllReduce:
    """With one other rank, through shared memory."""

    def __init__(self, row: torch.Tensor, other: int, tag: int, shared_rows: SharedRows, group: Any) -> None:
        self._row, self._other, self._shared_rows = row, other, shared_rows
        mine = shared_rows.take(row.numel() * row.element_size())
        mine.tensor.copy_(row.view(torch.uint8))
        self._theirs = torch.empty(2, dtype=torch.int64, device="cpu")
        self._works: list[Any] = [
            dist.irecv(self._theirs, src=other, group=group, tag=tag),
            dist.isend(mine.name, dst=other, group=group, tag=tag),
        ]

    def wait(self) -> None:
        """Wait until the row holds the sum."""
        for work in self._works:
            work.wait()
        nbytes = self._row.numel() * self._row.element_size()
        theirs = self._shared_rows.open(self._other, self._theirs, nbytes)
        self._row.add_(theirs.view(self._row.dtype).to(self._row.device))
