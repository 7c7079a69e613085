"""The connections of process groups, for the moment when a rank fails but its process lives on.

A rank that has failed leaves its process groups, and the others learn of it by their broken connections. But gloo
closes a connection only when nothing is under way on it: a sum that not all ranks have joined (the losses of the step
travel while backwards run) keeps it open until its timeout, and whoever drops the group waits as long. So the sockets
that appear while a group is made are noted, and `cut` shuts them down: every wait on either side ends, with an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Lines", "let_go"]

_PATIENCE_S = 5.0


class Lines:
    """Sockets of this process that belong to process groups."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around the making of a group."""
        before = _sockets()
        yield
        self._sockets |= _sockets() - before

    def cut(self) -> None:
        """Shut all of them down; nothing happens to a number that has become another file since."""
        for fd, _ in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
                line.getpeername()  # raises for one that listens, which gloo would take badly
                line.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()


def _sockets() -> set[tuple[int, str]]:
    """Sockets by number and identity; none where the system does not tell."""
    found = set()
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if (what := str(path.readlink())).startswith("socket:"):
                    found.add((int(path.name), what))
    return found


def let_go(groups: list[Any]) -> None:
    """Drop process groups; one that waits for what is still under way does so without us."""
    thread = threading.Thread(target=groups.clear, name="outcore leave", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
