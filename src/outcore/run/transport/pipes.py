"""Short messages between the ranks of one host, through pipes.

gloo moves every message on a thread of its own, and a message needs that thread at both ends: a receiver's says that it
is ready, a sender's answers with the bytes. Where ranks compute on all cores, each of these threads first waits for a
core, about a millisecond for a message of a few bytes. A pipe needs no third thread: the sender writes, the kernel
keeps the bytes, and the receiver reads them when it comes to it, or is woken if it waits already. What a sender has
written to shared memory before it writes to the pipe is seen by whoever has read from the pipe, on every processor.

Each rank makes a pipe to every other, whose reading end the other opens through /proc. Messages have a tag, and those
of one tag arrive in the order in which they were sent. A message that does not fit into a full pipe waits in the sender
until there is room: while it sends, waits, or finishes the step. A pipe whose other end is gone ends a wait at once;
otherwise a wait looks once a second whether there is still anybody to wait for, and whether it has taken too long
(`WatchedWait`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from outcore.run.transport.watched_wait import LOOK_S

MOST_BYTES = select.PIPE_BUF - 16
"""Of a message: what is written in one piece or not at all."""

_HEAD = struct.Struct("<qi")  # tag, bytes
_READ_BYTES = 1 << 16
_HOLD_BYTES = 1 << 18
"""Of a pipe: a rank that computes does not write what a full pipe did not take."""

_BETWEEN_S = 0.005
"""How long a thread waits for another that reads the same pipe before it looks again."""

Look = Callable[[], None]


class OutgoingPipe:
    """The end that this rank writes to."""

    def __init__(self) -> None:
        self.reading, self._fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # more than a user may have: a smaller pipe serves too
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _HOLD_BYTES)
        self._late: deque[bytes] = deque()
        self._lock = threading.Lock()

    def handed_over(self) -> None:
        """The other rank has opened its end, or never will: with it this rank's copy of that end has to go."""
        os.close(self.reading)

    def send(self, tag: int, payload: bytes) -> None:
        """Send a message; returns at once."""
        assert len(payload) <= MOST_BYTES
        with self._lock:
            self._late.append(_HEAD.pack(tag, len(payload)) + payload)
            self._write()

    def flush(self) -> bool:
        """Write what did not fit before; returns whether all of it is written."""
        if self._late:
            with self._lock:
                self._write()
        return not self._late

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._late:
                os.write(self._fd, self._late[0])
                self._late.popleft()

    def close(self) -> None:
        """Close it; whoever waits at the other end is told."""
        with self._lock:
            self._late.clear()
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class IncomingPipe:
    """The end that this rank reads from, by any of its threads."""

    def __init__(self, pid: int, fd: int) -> None:
        path = Path(f"/proc/{pid}/fd/{fd}")
        if not str(path.readlink()).startswith("pipe:"):
            raise OSError(f"{path} is not a pipe")
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._rest = b""
        self._there: dict[int, deque[bytes]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._reading, self._closed = False, threading.Event()

    def receive(self, tag: int, rank: int, flush: Callable[[], bool], look: Look) -> bytes:
        """The next message of a tag, once it is there.

        Args:
            tag: of the message.
            rank: who sends it, for the error.
            flush: called meanwhile, so that what the other waits for does not wait for this one.
            look: called once a second; raises if there is nothing to wait for any more.
        """
        looked = time.monotonic()
        while True:
            with self._changed:
                if (found := self._take(tag)) is not None:
                    return found
                if self._closed.is_set():
                    raise ConnectionError("this rank has closed its pipes")
                if self._reading:
                    self._changed.wait(_BETWEEN_S)
                    continue
                self._reading = True
            try:
                self._read(rank, flush)
            finally:
                with self._changed:
                    self._reading = False
                    if self._closed.is_set():
                        os.close(self._fd)
                    self._changed.notify_all()
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()

    def _take(self, tag: int) -> bytes | None:
        waiting = self._there.get(tag)
        if not waiting:
            return None
        found = waiting.popleft()
        if not waiting:
            del self._there[tag]
        return found

    def _read(self, rank: int, flush: Callable[[], bool]) -> None:
        """Sort in what has come; waits for something for a second, for less while something has still to be sent."""
        if not self._poll.poll(LOOK_S * 1e3 if flush() else _BETWEEN_S * 1e3):
            return
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError(f"rank {rank} has closed its pipe")
        data, at = self._rest + data, 0
        with self._changed:
            while len(data) - at >= _HEAD.size:
                tag, length = _HEAD.unpack_from(data, at)
                end = at + _HEAD.size + length
                if end > len(data):
                    break
                self._there[tag].append(data[at + _HEAD.size : end])
                at = end
        self._rest = data[at:]

    def close(self) -> None:
        """Close it; a thread that reads at that moment does so when it returns."""
        with self._changed:
            if not self._closed.is_set() and not self._reading:
                os.close(self._fd)
            self._closed.set()


class HostPipes:
    """This rank's ends of the pipes between it and the ranks that it can reach."""

    def __init__(self, outgoing: dict[int, OutgoingPipe], incoming: dict[int, IncomingPipe]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def send(self, target: int, tag: int, payload: bytes) -> None:
        """Send a short message; returns at once."""
        try:
            self._outgoing[target].send(tag, payload)
        except OSError as error:
            raise ConnectionError(f"rank {target} does not read its pipe any more") from error

    def receive(self, source: int, tag: int, look: Look) -> bytes:
        """The next message of a tag from a rank, once it is there; raises what `look`, called once a second, does."""
        return self._incoming[source].receive(tag, source, self.flush, look)

    def flush(self) -> bool:
        """Write what did not fit into a full pipe before; returns whether all of it is written."""
        try:
            written = [pipe.flush() for pipe in self._outgoing.values()]
        except OSError as error:
            raise ConnectionError("a rank does not read its pipe any more") from error
        return all(written)

    def finish(self, look: Look) -> None:
        """Wait until all that was sent is written."""
        looked = time.monotonic()
        while not self.flush():
            time.sleep(_BETWEEN_S)
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()

    def close(self) -> None:
        """Close all ends; whoever waits for this rank is told."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()
        self._outgoing, self._incoming = {}, {}
