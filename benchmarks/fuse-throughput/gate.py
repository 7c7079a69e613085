"""Processes that prepare side by side and measure alone.

Building models, recording them and letting cuDNN pick its algorithms takes seconds of CPU per row; the row itself a
fraction of one. So several processes prepare at the same time, and whoever measures has the machine for itself: all
others stand still, on the CPU too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.context import BaseContext

_PATIENCE_S = 90.0
"""How long to wait for a process that may have died."""


class Gate:
    """Shared by `count` processes."""

    def __init__(self, context: BaseContext, count: int) -> None:
        self.count, self.permits, self.turnstile = count, context.Semaphore(count), context.Lock()

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Inside, others may prepare too."""
        self._take(1)
        try:
            yield
        finally:
            self.permits.release()

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
