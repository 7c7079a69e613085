"""Processes that prepare side by side and measure alone.

Building models, recording them and letting cuDNN pick its algorithms takes seconds of CPU per row; the row itself a
fraction of one. So several processes prepare at the same time, and whoever measures has the machine for itself: all
others stand still, on the CPU too. What is prepared lies on the device until it is measured: rows are admitted by the
memory they will take, and one that must wait for it holds nobody up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.context import BaseContext

_PATIENCE_S = 90.0
"""How long to wait for a process that may have died."""


class Gate:
    """Shared by `count` processes."""

    def __init__(self, context: BaseContext, count: int, gib: float) -> None:
        self.count, self.permits, self.turnstile = count, context.Semaphore(count), context.Lock()
        self.gib, self.free, self.changed = gib, context.Value("d", gib, lock=False), context.Condition()

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Inside, others may prepare too."""
        self._take(1)
        try:
            yield
        finally:
            self.permits.release()

    @contextlib.contextmanager
    def room(self, gib: float) -> Iterator[None]:
        """Inside `prepare`: wait until there is so much memory, and have it; never twice at a time."""
        wanted = min(gib, self.gib)
        self.permits.release()  # who waits does not prepare
        with self.changed:
            self.changed.wait_for(lambda: self.free.value >= wanted)
            self.free.value -= wanted
        self._take(1)
        try:
            yield
        finally:
            with self.changed:
                self.free.value += wanted
                self.changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside `prepare`: wait until nobody prepares, and have the machine."""
        self.permits.release()
        taken = self._take(self.count)
        try:
            yield
        finally:
            for _ in range(taken):
                self.permits.release()
            self._take(1)

    def _take(self, count: int) -> int:
        taken = 0
        with self.turnstile:
            for _ in range(count):
                taken += self.permits.acquire(timeout=_PATIENCE_S)
        return taken
