"""Short messages between ranks, over pipes within a host and over sockets between hosts.

gloo moves every message on a thread of its own, and a message needs that thread at both ends: a receiver's says that it
is ready, a sender's answers with the bytes. Where ranks compute on all cores, each of these threads first waits for a
core, about a millisecond for a message of a few bytes. A pipe or a socket needs no third thread: the sender writes, the
kernel keeps the bytes, and the receiver reads them when it comes to it, or is woken if it waits already. What a sender
has written to shared memory before it writes to a pipe is seen by whoever has read from the pipe, on every processor.

A channel goes one way between two ranks (`outcore.run.transport.pipes` and `sockets` make them). Messages have a tag,
and those of one tag arrive in the order in which they were sent. A message that the kernel does not take waits in the
sender until there is room, and is then written by the next call here, or else by a thread that is there for nothing
else: the sender may be waiting for the receiver elsewhere, in one of gloo's collectives, while that one waits for the
rest of the message. A channel whose other end is gone ends a wait at once; otherwise a wait looks once a second whether
there is still anybody to wait for, and whether it has taken too long (`WatchedWait`).
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from outcore.run.transport.watched_wait import LOOK_S

HOLD_BYTES = 1 << 18
"""Of a channel, in the kernel: a rank that computes does not write what a full one did not take."""
MOST_BYTES = 1 << 16
"""Of a message, so that several find room."""

_HEAD = struct.Struct("<qi")  # tag, bytes
_READ_BYTES = 1 << 16

_LATE_MS = 100
"""How long the thread that writes what was left waits for room before it looks whether it is to end."""
_BETWEEN_S = 0.005
"""How long a thread waits for another that reads the same channel before it looks again."""

Look = Callable[[], None]
Flush = Callable[[], list[int]]
"""Writes what is left to write; returns the files to wait for if that is not all."""


class OutgoingChannel:
    """The end that this rank writes to: a file that does not block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._late: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def send(self, tag: int, payload: bytes) -> None:
        """Send a message; returns at once."""
        assert len(payload) <= MOST_BYTES
        with self._lock:
            self._late.append(memoryview(_HEAD.pack(tag, len(payload)) + payload))
            self._write()

    @property
    def is_late(self) -> bool:
        """Whether something is left to write."""
        return bool(self._late)

    def flush(self) -> int | None:
        """Write what did not fit before; returns the file to wait for if something is left."""
        if self._late:
            with self._lock:
                self._write()
        return self._fd if self._late else None

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._late:
                written = os.write(self._fd, self._late[0])
                if written < len(self._late[0]):
                    self._late[0] = self._late[0][written:]
                else:
                    self._late.popleft()

    def close(self) -> None:
        """Close it; whoever waits at the other end is told."""
        with self._lock:
            self._late.clear()
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class IncomingChannel:
    """The end that this rank reads from, by any of its threads: a file that does not block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._rest = b""
        self._there: dict[int, deque[bytes]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._reading, self._closed = False, threading.Event()

    def receive(self, tag: int, rank: int, flush: Flush, look: Look) -> bytes:
        """The next message of a tag, once it is there.

        Args:
            tag: of the message.
            rank: who sends it, for the error.
            flush: writes what is left to write, so that what the other waits for does not wait for this one.
            look: called once a second; raises if there is nothing to wait for any more.
        """
        looked = time.monotonic()
        while True:
            with self._changed:
                if (found := self._take(tag)) is not None:
                    return found
                if self._closed.is_set():
                    raise ConnectionError("this rank has closed its connections")
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

    def _read(self, rank: int, flush: Flush) -> None:
        """Sort in what has come; waits for something for a second, or until what is left can be written."""
        if late := flush():
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            for fd in late:
                poll.register(fd, select.POLLOUT)
            ready = [fd for fd, _ in poll.poll(LOOK_S * 1e3)]
        else:
            ready = [fd for fd, _ in self._poll.poll(LOOK_S * 1e3)]
        if self._fd not in ready:
            return
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionError(f"the connection to rank {rank} is broken: {error.strerror}") from error
        if not data:
            raise ConnectionError(f"rank {rank} has closed its connection")
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


class _LateWriter:
    """A thread that writes what did not fit into a full channel as soon as there is room, whatever this rank does."""

    def __init__(self, write: Flush) -> None:
        self._write, self._awake, self._closed = write, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcore write", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something is left to write."""
        self._awake.set()

    def close(self) -> None:
        """End the thread; what is left is not written."""
        self._closed.set()
        self._awake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            self._awake.clear()
            with contextlib.suppress(ConnectionError):  # which whoever sends or waits next is told
                while not self._closed.is_set() and (late := self._write()):
                    poll = select.poll()
                    for fd in late:
                        poll.register(fd, select.POLLOUT)
                    poll.poll(_LATE_MS)
            if self._closed.is_set():
                return


class Channels:
    """This rank's ends of the channels between it and the ranks that it can reach."""

    def __init__(self, outgoing: dict[int, OutgoingChannel], incoming: dict[int, IncomingChannel]) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._late_writer: _LateWriter | None = None

    def add(self, rank: int, outgoing: OutgoingChannel, incoming: IncomingChannel) -> None:
        """Take the channels to one more rank."""
        self._outgoing[rank], self._incoming[rank] = outgoing, incoming

    def send(self, target: int, tag: int, payload: bytes) -> None:
        """Send a short message; returns at once."""
        channel = self._outgoing[target]
        try:
            channel.send(tag, payload)
        except OSError as error:
            raise ConnectionError(f"rank {target} does not read any more") from error
        if channel.is_late:
            if self._late_writer is None:
                self._late_writer = _LateWriter(self._write_late)
            self._late_writer.wake()

    def receive(self, source: int, tag: int, look: Look) -> bytes:
        """The next message of a tag from a rank, once it is there; raises what `look`, called once a second, does."""
        return self._incoming[source].receive(tag, source, self._write_late, look)

    def flush(self) -> bool:
        """Write what did not fit into a full channel before; returns whether all of it is written."""
        return not self._write_late()

    def _write_late(self) -> list[int]:
        try:
            return [fd for channel in [*self._outgoing.values()] if (fd := channel.flush()) is not None]
        except OSError as error:
            raise ConnectionError("a rank does not read any more") from error

    def finish(self, look: Look) -> None:
        """Wait until all that was sent is written."""
        looked = time.monotonic()
        while late := self._write_late():
            poll = select.poll()
            for fd in late:
                poll.register(fd, select.POLLOUT)
            poll.poll(LOOK_S * 1e3)
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()

    def close(self) -> None:
        """Close all ends; whoever waits for this rank is told."""
        if self._late_writer is not None:
            self._late_writer.close()
            self._late_writer = None
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()
        self._outgoing, self._incoming = {}, {}
