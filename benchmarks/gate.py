"""Processes that prepare side by side and measure alone.

Building models, recording them and letting cuDNN pick its algorithms takes seconds of CPU per row, for some workloads a
minute; the row itself a fraction of a second. So several processes prepare at the same time, and whoever measures has
the machine for itself: it stops all others where they are (SIGSTOP), and the processes that they have started, waits
until the device has done what they had asked for, and lets them go on afterwards. Nobody has to wait until others are
ready.

What is prepared lies on the device until it is measured, so rows are admitted by the memory they will take: large ones
one after the other, small ones beside them as long as there is room, in the order in which they asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path

_SETTLED_S = 0.2
"""What stopped processes have put in the device's queue is done by then, if it was little."""


class Gate:
    """Shared by `count` processes."""

    def __init__(self, context: BaseContext, count: int, gib: float, large_gib: float = float("inf")) -> None:
        self.large, self.large_gib = context.Lock(), large_gib
        self.turn, self.pids = context.Lock(), context.Array("i", count, lock=False)
        self.gib, self.free, self.changed = gib, context.Value("d", gib, lock=False), context.Condition()
        self.asked, self.served = context.Value("i", 0, lock=False), context.Value("i", 0, lock=False)

    @contextlib.contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """A process takes part, as number `index`."""
        self.pids[index] = os.getpid()
        try:
            yield
        finally:
            self.pids[index] = 0

    @contextlib.contextmanager
    def outside(self, index: int) -> Iterator[None]:
        """A process does what disturbs nobody and takes too long to be stopped; nothing on the device."""
        self.pids[index] = 0
        try:
            yield
        finally:
            with self.turn:
                self.pids[index] = os.getpid()

    @contextlib.contextmanager
    def room(self, gib: float) -> Iterator[None]:
        """Wait until there is so much memory, and have it; never twice at a time."""
        if gib > self.large_gib:
            with self.large:
                yield
            return
        wanted = min(gib, self.gib)
        with self.changed:
            ticket, self.asked.value = self.asked.value, self.asked.value + 1
            self.changed.wait_for(lambda: self.served.value == ticket and self.free.value >= wanted)
            self.free.value -= wanted
            self.served.value += 1
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.free.value += wanted
                self.changed.notify_all()

    @contextlib.contextmanager
    def alone(self, settle: Callable[[], None] = lambda: time.sleep(_SETTLED_S)) -> Iterator[None]:
        """Have the machine, once `settle` has seen the device quiet."""
        with self.turn:
            others = [pid for pid in self.pids if pid not in (0, os.getpid())]
            try:
                _send(others, signal.SIGSTOP)
                settle()
                yield
            finally:
                _send(others, signal.SIGCONT)


def _send(pids: list[int], what: signal.Signals) -> None:
    """To processes and to those that they have started."""
    for pid in [one for taking_part in pids for one in (taking_part, *children(taking_part))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def children(pid: int) -> list[int]:
    """The processes that a process has started, theirs too; none where the system does not tell."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *children(child)]
    return found
