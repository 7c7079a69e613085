"""Channels between the ranks of one host: pipes.

Each rank makes a pipe to every other, whose reading end the other opens through /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from outcore.run.transport.channels import HOLD_BYTES, IncomingChannel, OutgoingChannel


class OutgoingPipe(OutgoingChannel):
    """The end that this rank writes to."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # more than a user may have: a smaller pipe serves too
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, HOLD_BYTES)
        super().__init__(writing)

    def handed_over(self) -> None:
        """The other rank has opened its end, or never will: with it this rank's copy of that end has to go."""
        os.close(self.reading)


def incoming_pipe(pid: int, fd: int) -> IncomingChannel:
    """The end that another process has for this rank."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    if not str(path.readlink()).startswith("pipe:"):
        raise OSError(f"{path} is not a pipe")
    return IncomingChannel(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
