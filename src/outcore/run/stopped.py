"""Ranks that were stopped before they came: only who started them can see it.

A rank that has come gives a sign of life in the store, and the others notice when it falls silent
(`outcore.run.ranks.faults`). One that is stopped (SIGSTOP, a debugger) while it still imports has given none, and the
others would wait for it as long as for a rank that is started late on another host, minutes. The process that started
it can ask the system.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from outcore.run.ranks.faults import SILENT_AFTER_S
from outcore.run.ranks.store import StoreServer

LOOK_S = 1.0
"""Between two looks."""


class StoppedRanks:
    """Which of the processes that were started here have been stopped for how long."""

    def __init__(self, pids: Sequence[int], store: StoreServer) -> None:
        self._pids, self._store = tuple(pids), store
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def found(self) -> str | None:
        """What is said of a rank that was stopped for too long while starting, if there is one."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return None
        # Where this process did not run either (it was stopped, the machine slept), time does not count.
        slept, self._looked = now - self._looked > 5 * LOOK_S, now
        for rank, pid in enumerate(self._pids):
            if not _is_stopped(pid) or self._store.find(f"beat/{rank}") is not None:
                self._since.pop(rank, None)
            elif slept or rank not in self._since:
                self._since[rank] = now
            elif now - self._since[rank] > SILENT_AFTER_S:
                return f"rank {rank} was stopped while starting, and is so for {SILENT_AFTER_S:.0f} s"
        return None


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
