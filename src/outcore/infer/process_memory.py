"""The memory of the process: anonymous memory, as the system counts it.

A budget on a CPU is about tensors and about what reading takes; Python and torch themselves come on top. Pages of files
that are mapped are not counted: the system takes them back when it needs them.

The allocator of the C library keeps what was freed: it raises the size from which blocks are given back to the system
with every large block that is freed, up to 32 MiB, and tiles of a network are of that size. `give_back_freed` holds
that size at 1 MiB; for a small network within 128 MiB it took off 120 MiB of 270 and no time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ProcessMemory", "anonymous_bytes", "give_back_freed"]

_EVERY_S = 0.02
_M_MMAP_THRESHOLD = -3
"""The parameter's number in the C library's malloc.h."""


def anonymous_bytes() -> int | None:
    """Resident anonymous memory of this process; None where the system does not say."""
    try:
        with Path("/proc/self/status").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def give_back_freed() -> None:
    """Have blocks of 1 MiB and more given back to the system when they are freed; where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class ProcessMemory:
    """The most that is held inside of a ``with`` statement, sampled by a thread of its own."""

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outcore-process-memory", daemon=True)

    def __enter__(self) -> Self:
        if self.before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.peak_bytes = max(self.peak_bytes or 0, now)
