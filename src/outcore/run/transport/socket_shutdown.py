"""The connections of process groups, for the moment when a rank fails but its process lives on.

A rank that has failed leaves its process groups, and the others learn of it by their broken connections. But gloo
closes a connection only when nothing is under way on it: an all-reduce that not all ranks have joined (the losses of
the step are exchanged while backwards run) keeps it open until its timeout, and whoever drops the group waits as long.
So the sockets that appear while a group is made are noted, and `cut` shuts each down for writing. The others' waits end
with an error, they close their side, and ours end too. Only then may ours be closed: gloo drops what it is about to
write to a rank that does not read any more, and whoever waits for that waits on (see
`outcore.run.transport.watched_wait`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_S = 5.0
_NOTICE_S = 0.2
"""Seconds until the others have noticed a shutdown."""


class GroupSockets:
    """Sockets of this process that belong to process groups."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, str]] = set()
        self.are_cut = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the sockets that appear while a group is made."""
        before = _sockets()
        yield
        self._sockets |= _sockets() - before

    def cut(self) -> None:
        """Shut all of them down from our side, except numbers that have become another file since."""
        for fd, _ in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
                line.getpeername()  # raises for one that listens, which gloo would take badly
                line.shutdown(socket.SHUT_WR)
        self._sockets.clear()
        self.are_cut = True

    def let_go(self, groups: list[Any]) -> None:
        """Drop process groups, the last first; one that waits for what is still under way does so on a thread of its
        own."""
        if self.are_cut:
            time.sleep(_NOTICE_S)
        thread = threading.Thread(target=groups.clear, name="outcore leave", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


def _sockets() -> set[tuple[int, str]]:
    """Sockets by number and identity; empty where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (what := str(path.readlink())).startswith("socket:"):
                    found.add((int(path.name), what))
    return found
