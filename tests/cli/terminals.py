"""A command in a process of its own, on a terminal and a disk that are not as they should be.

torch takes seconds to import, so the process is a fork of the one that runs the tests. It gets other standard streams,
a width, an encoding, a folder that takes no files or only small ones, and leaves with the exit code of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pty
import random
import select
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from tests.file_size_limit import limit_file_size

__all__ = ["Ended", "Surroundings", "draw_surroundings", "run_command"]

_SMALL_FILE = 600
"""Bytes of a file that can still be written on a disk that is said to be full."""
_LONGEST_S = 400.0
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


@dataclass(frozen=True)
class Surroundings:
    """What a command meets."""

    columns: int | None = None
    colour: str = "NO_COLOR"
    stdout: str = "pipe"
    """pipe, terminal, closed (nobody reads it), full (a disk without room) or none (closed by whoever started it)."""
    encoding: str = "utf-8"
    folder: str = "ordinary"
    """ordinary, read-only or full."""
    cache: str = "ordinary"
    """ordinary or read-only."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    """Less than 0: the signal that ended it."""
    stdout: str
    stderr: str


def draw_surroundings(draw: random.Random) -> Surroundings:
    """Some combination."""
    return Surroundings(
        draw.choice((None, 20, 40, 40, 200)),
        draw.choice(("NO_COLOR", "FORCE_COLOR", "dumb")),
        draw.choice(("pipe", "pipe", "terminal", "terminal", "closed", "full", "none")),
        draw.choice(("utf-8", "ascii", "ascii", "latin-1", "cp1252")),
        draw.choice(("ordinary", "ordinary", "read-only", "full")),
        draw.choice(("ordinary", "ordinary", "read-only")),
    )


def run_command(words: Sequence[str], around: Surroundings, folder: Path, cache: Path) -> Ended:
    """Run `outcore` with these words in a folder."""
    reading, writing = os.pipe()
    complaints, complaining = os.pipe()
    if around.stdout == "terminal":
        _close(reading, writing)
        reading, writing = pty.openpty()
        ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, around.columns or 80, 0, 0))
    child = os.fork()
    if child == 0:
        code = 70
        try:
            _close(reading, complaints)
            code = _inside(words, around, folder, cache, writing, complaining)
        except BaseException:
            with contextlib.suppress(BaseException):
                os.write(complaining, traceback.format_exc().encode())
        finally:
            os._exit(code)
    _close(writing, complaining)
    if around.stdout == "closed":
        _close(reading)
        reading = -1
    printed = _read_all([fd for fd in (reading, complaints) if fd >= 0], child)
    _, status = os.waitpid(child, 0)
    _close(*(fd for fd in (reading, complaints) if fd >= 0))
    said = {fd: text.decode(around.encoding, errors="replace") for fd, text in printed.items()}
    return Ended(os.waitstatus_to_exitcode(status), said.get(reading, ""), said[complaints])


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _read_all(fds: Sequence[int], child: int) -> dict[int, bytes]:
    """What comes until the other ends are closed."""
    found, left, end = dict.fromkeys(fds, b""), set(fds), time.monotonic() + _LONGEST_S
    while left:
        ready, _, _ = select.select(list(left), [], [], 5.0)
        for fd in ready:
            try:
                content = os.read(fd, 1 << 16)
            except OSError:  # a terminal whose other end is closed
                content = b""
            found[fd] += content
            if not content:
                left.remove(fd)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            break
    return found


def _inside(
    words: Sequence[str], around: Surroundings, folder: Path, cache: Path, writing: int, complaining: int
) -> int:
    """The child: set everything up, run the command, return its code."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        os.environ.pop(name, None)
    os.environ |= {"TERM": "dumb"} if around.colour == "dumb" else {around.colour: "1", "TERM": "xterm"}
    if around.columns is not None:
        os.environ["COLUMNS"] = str(around.columns)
    os.environ.pop("OUTCORE_CACHE", None)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    if around.stdout == "full":
        writing = os.open("/dev/full", os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(writing, 1)
    os.dup2(complaining, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=around.encoding, line_buffering=True)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(
        open(2, "wb", closefd=False),  # noqa: SIM115
        encoding=around.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
    if around.stdout == "none":
        os.close(1)
        sys.stdout = None
    os.chdir(folder)
    _obey_permissions()
    if around.folder == "full":
        limit_file_size(_SMALL_FILE)
    from outcore.cli.main import main

    sys.argv = ["outcore", *words]
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(bool(left.code))
    else:
        code = 0
    with contextlib.suppress(Exception):
        if sys.stdout is not None:
            sys.stdout.flush()
    return code


def _obey_permissions() -> None:
    """Root may write everywhere; this process may not any more."""
    if os.geteuid() != 0:
        return
    header = struct.pack("Ii", 0x20080522, 0)
    given = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, given) != 0:
        return
    sets = list(struct.unpack("6I", given.raw))
    gone = ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH) & 0xFFFFFFFF
    sets[0] &= gone
    sets[1] &= gone
    libc.capset(header, struct.pack("6I", *sets))


@contextlib.contextmanager
def guarded(folder: Path, read_only: bool) -> Iterator[None]:
    """A folder that takes no new files, if so wanted."""
    mode = folder.stat().st_mode
    if read_only:
        folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(mode)
