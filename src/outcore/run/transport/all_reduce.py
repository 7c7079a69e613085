"""A row of numbers added up over the ranks that hold copies of a stage, while other things run.

Over any group gloo does it, on the hosts. Ranks of one host do it themselves, through shared memory, and so do ranks of
several hosts with a small row, through sockets: gloo's threads at both ends would first wait for a core, for longer
than the bytes take. Two ranks give each other their rows and add both, each for itself: a + b and b + a are the same
bits. Of more, each is given one part of all rows, adds it in the order of ranks, and gives the others the sum. Either
way every copy gets the same bits.

All reductions of a step are started before the first is added, and all are added before the first is waited for, so
ranks that take them in different orders do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from outcore.run.transport.shared_memory import SharedRows
from outcore.run.transport.watched_wait import WatchedWait


class AllReduce(Protocol):
    """An all-reduce under way."""

    def add(self) -> None:
        """Add what this rank adds, once the others' rows are there."""

    def wait(self) -> None:
        """Wait until the row holds the sum."""


class GlooAllReduce:
    """Over a process group, through the host."""

    def __init__(self, row: torch.Tensor, group: Any, watched_wait: WatchedWait) -> None:
        self._row, self._host, self._watched_wait = row, row.cpu(), watched_wait
        self._work: Any = dist.all_reduce(self._host, group=group, async_op=True)

    def add(self) -> None:
        """Nothing: gloo's own thread does."""

    def wait(self) -> None:
        """Wait until the row holds the sum."""
        self._watched_wait.wait(self._work)
        if self._host is not self._row:
            self._row.copy_(self._host)


class DirectAllReduce:
    """Between ranks that all have channels to each other (`SharedRows.connect`)."""

    def __init__(self, row: torch.Tensor, rank: int, ranks: Sequence[int], tag: int, shared_rows: SharedRows) -> None:
        self._row, self._tag, self._shared_rows = row, tag, shared_rows
        self._ranks, self._rank = sorted(ranks), rank
        self._others = [other for other in self._ranks if other != rank]
        if len(self._others) == 1:
            shared_rows.send_to(row.view(torch.uint8), self._others, tag)
            return
        for other, part in self._parts():
            if other != rank:
                shared_rows.send_to(part.view(torch.uint8), [other], tag)

    def _parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The part of the row that each rank adds."""
        return zip(self._ranks, self._row.tensor_split(len(self._ranks)), strict=True)

    def add(self) -> None:
        """Add this rank's part of the rows, and give the others the sum."""
        if len(self._others) == 1:
            self._row.add_(self._receive(self._others[0], self._row.numel()).to(self._row.device))
            return
        own = dict(self._parts())[self._rank]
        parts = [own if rank == self._rank else self._receive(rank, own.numel()) for rank in self._ranks]
        total = parts[0].to(own.device) + parts[1].to(own.device)
        for part in parts[2:]:
            total += part.to(own.device)
        own.copy_(total)
        self._shared_rows.send_to(total.view(torch.uint8), self._others, self._tag)

    def wait(self) -> None:
        """Wait until the row holds the sum."""
        for rank, part in self._parts() if len(self._others) > 1 else ():
            if rank != self._rank:
                part.copy_(self._receive(rank, part.numel()))

    def _receive(self, source: int, count: int) -> torch.Tensor:
        nbytes = count * self._row.element_size()
        return self._shared_rows.receive(source, self._tag, nbytes).view(self._row.dtype)
