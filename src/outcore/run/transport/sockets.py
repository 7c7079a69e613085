"""Channels between the ranks of several hosts: TCP sockets.

Every rank listens for a moment, at one address and a free port, and tells the others through the process group; of two
ranks the higher connects. Both prove that they know the run's secret, as at the store (`outcore.run.ranks.store`), and
then the one that connects says which rank of which meeting it is. Whoever else connects is cut off, and takes nobody's
place. A pair that cannot connect (a firewall between them) stays without a channel, and sends through gloo: no run
fails for want of one. Where a host has several networks, ``GLOO_SOCKET_IFNAME`` says which one is listened on, as for
gloo; otherwise it is that over which this rank reached the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection
from typing import Any

from outcore.run.ranks.store import admit, enter, exactly, listen
from outcore.run.ranks.world import World
from outcore.run.transport.channels import HOLD_BYTES, IncomingChannel, OutgoingChannel

_CONNECT_S = 5.0
"""Within which two ranks have a channel, or none."""
_TOKEN_BYTES = 16
_WHO = struct.Struct("<i")
_PURPOSE = b"channel"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_STRANGERS = 64


def connect_ranks(world: World, others: Collection[int]) -> tuple[dict[int, socket.socket], list[list[int]]]:
    """Sockets to some of the others, by rank, and to which lower ranks each has one; collective, also for ranks
    without any."""
    assert world.meeting is not None
    listener, secret = _Listener.at(own_address(world)), world.meeting.store.secret
    try:
        offered = world.share([listener.address if listener else None, secrets.token_hex(_TOKEN_BYTES)])
        token = bytes.fromhex(offered[0][1])  # that of the first rank is the meeting's
        if listener is not None:
            listener.start(secret, token)
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _CONNECT_S
        for rank in sorted(others):
            if rank < world.rank and offered[rank][0] is not None:
                with contextlib.suppress(OSError):
                    found[rank] = _connected(offered[rank][0], secret, token, world.rank, deadline)
        made = world.share(sorted(found))  # whoever is named here was let in before its name was
    finally:
        came = listener.close() if listener is not None else {}
    for rank, line in came.items():
        if rank in others and world.rank in made[rank]:
            found[rank] = line
        else:
            line.close()
    return found, made


def channels_of(line: socket.socket) -> tuple[OutgoingChannel, IncomingChannel]:
    """The channels for sending and receiving over one socket."""
    line.setblocking(False)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HOLD_BYTES)
    there = os.dup(line.fileno())
    return OutgoingChannel(line.detach()), IncomingChannel(there)


def own_address(world: World) -> str:
    """The address at which this rank listens."""
    assert world.meeting is not None
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, asked)[20:24])
    return world.meeting.store.own_address


def _connected(where: list[Any], secret: str, token: bytes, rank: int, deadline: float) -> socket.socket:
    """A socket to a rank that listens there, once both know that they belong together."""
    left = max(0.1, deadline - time.monotonic())
    line = socket.create_connection((str(where[0]), int(where[1])), timeout=left)
    try:
        if not enter(line, secret.encode(), _PURPOSE):
            raise ConnectionError("whoever listens there does not know the secret")
        line.sendall(token + _WHO.pack(rank))
        exactly(line, 1)
    except BaseException:
        line.close()
        raise
    return line


class _Listener:
    """Lets the other ranks of a meeting in, on threads of its own."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.address = list(line.getsockname()[:2])
        self._came: dict[int, socket.socket] = {}
        self._lock, self._open = threading.Lock(), True
        self._handshakes = threading.BoundedSemaphore(_STRANGERS)

    @classmethod
    def at(cls, address: str) -> _Listener | None:
        """One at a free port of an address; None where that cannot be listened on."""
        try:
            return cls(listen(address, 0))
        except OSError:
            return None

    def start(self, secret: str, token: bytes) -> None:
        threading.Thread(target=self._accept, args=(secret, token), name="outcore listen", daemon=True).start()

    def _accept(self, secret: str, token: bytes) -> None:
        while True:
            try:
                line, _ = self._line.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                line.close()
                continue
            threading.Thread(target=self._let_in, args=(line, secret, token), daemon=True).start()

    def _let_in(self, line: socket.socket, secret: str, token: bytes) -> None:
        try:
            line.settimeout(_CONNECT_S)
            if admit(line, secret.encode(), _PURPOSE) and secrets.compare_digest(exactly(line, len(token)), token):
                (rank,) = _WHO.unpack(exactly(line, _WHO.size))
                with self._lock:
                    if self._open and rank not in self._came:
                        self._came[rank] = line
                        line.sendall(b"=")
                        return
        except OSError:  # it hung up, or said nothing
            pass
        finally:
            self._handshakes.release()
        line.close()

    def close(self) -> dict[int, socket.socket]:
        """Listen no longer; returns who came, by rank."""
        with self._lock:
            self._open = False
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        return self._came
