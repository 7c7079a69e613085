"""Waits for other ranks that end when those have.

gloo ends a wait with an error when the connection breaks, but not always: what it was about to write at that moment is
forgotten, and whoever waits for it waits until the timeout, minutes after all others have left. So a wait is not left
to gloo alone. It looks up once a second: has a rank reported a failure, have heartbeats stopped (`FaultMonitor.look`)?
Where all is well this costs nothing: the wait returns when the work is done, as it would without.

Receives from other hosts into host memory are the exception (`outcore.run.transport.p2p`): gloo takes the first wait
for one that is not long enough as the end of the connection. They end when it breaks; where they do not, the fault
monitor ends the rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outcore.memory.offload.worker_threads import WorkerTask
from outcore.run.ranks.current_work import CurrentWork

LOOK_S = 1.0
T = TypeVar("T")


class WatchedWait:
    """Waits for other ranks, and ends with a report when one of them has failed."""

    def __init__(self, place: CurrentWork) -> None:
        self.place = place
        self.look: Callable[[], None] | None = None
        """Raises if there is nothing to wait for any more."""
        self.timeout_s = math.inf
        """After which a wait that is not gloo's ends; gloo's groups have it of their own."""

    def wait(self, work: Any) -> None:
        """Wait until a collective operation of gloo is done; raises what went wrong."""
        with self.place.communicating():
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_S))
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises, unless it was done just now
                        return
                self.look_up()

    def result(self, task: WorkerTask[T]) -> T:
        """What another thread waits for."""
        with self.place.communicating():
            while True:
                try:
                    return task.result(LOOK_S)
                except TimeoutError:
                    if task.over:
                        return task.result()
                self.look_up()

    def look_up(self) -> None:
        """Raise if there is nothing to wait for any more."""
        if self.look is not None:
            self.look()

    def limited(self, whom: str) -> Callable[[], None]:
        """What a wait for a rank that begins now has to call now and then; raises also when it has taken too long, as
        for a rank that is alive and stuck."""
        began = time.monotonic()

        def look() -> None:
            self.look_up()
            if time.monotonic() - began > self.timeout_s:
                raise ConnectionError(f"{whom} has not answered for {self.timeout_s:.0f} s")

        return look

    def sum_(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Add a tensor on the host over a group, in place."""
        self.wait(dist.all_reduce(tensor, group=group, async_op=True))
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int, group: Any) -> torch.Tensor:
        """Copy a tensor on the host of one rank to all of a group, in place."""
        self.wait(dist.broadcast(tensor, src=source, group=group, async_op=True))
        return tensor
