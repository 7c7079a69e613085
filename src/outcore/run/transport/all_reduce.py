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

    def __init__(self, row: torch.Tensor, other: int, tag: int, shared_rows: SharedRows) -> None:
        self._row, self._other, self._tag, self._shared_rows = row, other, tag, shared_rows
        shared_rows.send(row.view(torch.uint8), other, tag)

    def wait(self) -> None:
        """Wait until the row holds the sum."""
        nbytes = self._row.numel() * self._row.element_size()
        theirs = self._shared_rows.receive(self._other, self._tag, nbytes)
        self._row.add_(theirs.view(self._row.dtype).to(self._row.device))
