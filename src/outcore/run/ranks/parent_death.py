"""Processes that do not outlive the one that started them.

A launcher that is killed cannot tell its ranks. On Linux the kernel does: each rank asks to be sent SIGTERM when its
parent dies, which is also how it is asked to save and leave. Where there is no such request, and where the launcher is
not dead but stopped, the ranks notice that the store it keeps no longer answers (`outcore.run.ranks.faults`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

LAUNCHER = "OUTCORE_LAUNCHER"
"""The variable that holds the process id of outcore's launcher."""

_PR_SET_PDEATHSIG = 1


def launcher_pid() -> int | None:
    """The process id of the launcher that started this rank, if it was outcore's own."""
    given = os.environ.get(LAUNCHER, "")
    return int(given) if given.isdigit() else None


def started_by_torchrun() -> bool:
    """Whether torchrun's agent is the parent of this process: ranks that it started go on when it is killed."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent(parent: int) -> Callable[[], None]:
    """A function for a child to call as soon as it can: it will get SIGTERM when its parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def ask() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it was gone before it could be asked for
            os._exit(128 + signal.SIGTERM)

    return ask
