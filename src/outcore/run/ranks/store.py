"""The rendezvous store: a small key-value store that only those who know the run's secret may use.

torch's own TCPStore listens on every interface, lets anybody read and write any key, and waits for ever on a server
that has stopped. Here the server listens on one address (loopback unless ranks of several hosts were asked for), a
connection begins with a proof on both sides that the run's secret is known (HMAC-SHA256 over fresh nonces), and every
operation ends in bounded time. Nothing is unpickled. Sizes read from a connection are checked before they are used.

    server                                   client
      ── nonce ───────────────────────────────▶
      ◀── nonce, HMAC(secret, "client", both) ──
      ── HMAC(secret, "server", both) ────────▶     then requests: length, JSON line {do, key, …}, bytes

Whoever fails the proof is disconnected and counted, and the first is reported on standard error. The proof is of the
beginning: on a network where somebody can write into open connections, use one that nobody can (a cluster's own, or a
VPN).

The other end is `outcore.run.ranks.store_client`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any

SILENT_S = 10.0
"""Without an answer for so long, an operation ends with an error."""
_LIMIT = 1 << 22
"""The largest message, in bytes: ranks exchange only addresses and short reports here."""
_NONCE_BYTES = 32
_HANDSHAKE_S = 5.0
_STRANGERS = 64
"""Connections that may be in their handshake at once."""


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


class StoreServer:
    """Holds the keys of one run, on threads of its own; `port` 0 takes a free one."""

    def __init__(self, secret: str, address: str = "127.0.0.1", port: int = 0) -> None:
        self._secret = secret.encode()
        self._values: dict[str, tuple[bytes, float]] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._handshakes = threading.BoundedSemaphore(_STRANGERS)
        self._failure: str | None = None
        self._open, self._taken = True, 0
        self.refused = 0
        """Connections that did not know the secret."""
        self._listening = listen(address, port)
        self.address, self.port = self._listening.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="outcore store", daemon=True)

    def start(self) -> StoreServer:
        """Begin to answer; clients that connected before have waited."""
        self._thread.start()
        return self

    def take_over(self) -> bool:
        """Use it for the next run although it is about to close; whether it still answers."""
        with self._changed:
            self._taken += self._open
            return self._open and self._failure is None

    def fail(self, why: str) -> None:
        """End all waits, now and later, because a rank that others wait for will not come."""
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def find(self, ending: str) -> bytes | None:
        """The first value whose key ends with `ending`."""
        with self._changed:
            return next((value for key, (value, _) in self._values.items() if key.endswith(ending)), None)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop answering, when nobody is connected any more or after a while; unless it is taken over meanwhile."""
        deadline, taken = time.monotonic() + linger_s, self._taken
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._changed:
            if taken != self._taken:
                return
            self._open = False
            self._changed.notify_all()
        for line in (self._listening, *self._connections):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        if self._thread.is_alive():
            self._thread.join(SILENT_S)

    def _accept(self) -> None:
        while self._open:
            try:
                line, peer = self._listening.accept()
            except OSError:
                return
            if not self._handshakes.acquire(blocking=False):
                line.close()
                continue
            threading.Thread(target=self._serve, args=(line, peer), name="outcore store", daemon=True).start()

    def _serve(self, line: socket.socket, peer: Any) -> None:
        with contextlib.closing(line):
            try:
                line.settimeout(_HANDSHAKE_S)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                known = admit(line, self._secret)
            except OSError:  # it hung up, or said nothing
                return
            finally:
                self._handshakes.release()
            if not known:
                self._refuse(peer)
                return
            line.settimeout(None)
            self._connections.add(line)
            with contextlib.suppress(OSError, ValueError):
                while self._open:
                    send(line, self._answer(receive(line)))
            self._connections.discard(line)

    def _refuse(self, peer: Any) -> None:
        self.refused += 1
        if self.refused == 1:
            text = f"outcore: a connection from {peer[0]} to port {self.port} did not know this run's secret; ignored"
            print(text, file=sys.stderr, flush=True)

    def _is_decided(self, keys: list[str]) -> bool:
        """Whether a wait for keys has ended, well or not."""
        return not self._open or self._failure is not None or all(key in self._values for key in keys)

    def _answer(self, request: bytes) -> bytes:
        """Answer one request; the first byte says whether it succeeded."""
        line, _, value = request.partition(b"\n")
        asked = json.loads(line)
        do, keys = asked["do"], [str(key) for key in asked["keys"]]
        with self._changed:
            if do in ("wait", "get"):
                self._changed.wait_for(lambda: self._is_decided(keys), min(float(asked["timeout_s"]), 3600.0))
                if not all(k in self._values for k in keys):
                    return b"!" + self._failure.encode() if self._failure is not None else b"?"
                return b"=" + (self._values[keys[0]][0] if do == "get" else b"")
            if do == "check":
                return b"=1" if all(k in self._values for k in keys) else b"=0"
            if do == "ages":
                now = time.monotonic()
                rows = {k: [now - since, v.decode()] for k, (v, since) in self._values.items() if k.startswith(keys[0])}
                return b"=" + json.dumps(rows).encode()
            if do == "delete":
                return b"=1" if self._values.pop(keys[0], None) is not None else b"=0"
            if do == "count":
                return b"=%d" % len(self._values)
            key, now = keys[0], time.monotonic()
            if do == "add":
                value = b"%d" % (int(self._values.get(key, (b"0", 0.0))[0]) + int(value))
            elif do == "compare":
                expected = str(asked["expected"]).encode()
                found = self._values[key][0] if key in self._values else b""
                if found != expected:
                    return b"=" + found
            elif do != "set":
                raise ValueError(f"no operation {do!r}")
            self._values[key] = value, now
            self._changed.notify_all()
            return b"=" + value


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at one address; `port` 0 takes a free one."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    os.set_inheritable(made.fileno(), False)
    return made


def prove(secret: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    """The proof of one side that it knows the secret, for the nonces of both."""
    return hmac.digest(secret, side + server + client, "sha256")


def admit(line: socket.socket, secret: bytes, purpose: bytes = b"") -> bool:
    """At the end that was connected to: whether the other end knows the secret; it is told that this one does."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    line.sendall(nonce)
    theirs, proof = exactly(line, _NONCE_BYTES), exactly(line, _NONCE_BYTES)
    if not hmac.compare_digest(proof, prove(secret, purpose + b"client", nonce, theirs)):
        with contextlib.suppress(OSError):
            line.sendall(bytes(_NONCE_BYTES))
        return False
    line.sendall(prove(secret, purpose + b"server", nonce, theirs))
    return True


def enter(line: socket.socket, secret: bytes, purpose: bytes = b"") -> bool:
    """At the end that connects: prove that it knows the secret; whether the other does too."""
    nonce, mine = exactly(line, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    line.sendall(mine + prove(secret, purpose + b"client", nonce, mine))
    return hmac.compare_digest(exactly(line, _NONCE_BYTES), prove(secret, purpose + b"server", nonce, mine))


def send(line: socket.socket, message: bytes) -> None:
    """Write one message."""
    if len(message) > _LIMIT:
        raise ValueError(f"a message of {len(message):,} bytes; at most {_LIMIT:,} go through the store")
    line.sendall(struct.pack(">I", len(message)) + message)


def receive(line: socket.socket) -> bytes:
    """Read one message; its size is checked before it is read."""
    (size,) = struct.unpack(">I", exactly(line, 4))
    if size > _LIMIT:
        raise ValueError(f"a message of {size:,} bytes was announced; at most {_LIMIT:,} are read")
    return exactly(line, size)


def exactly(line: socket.socket, count: int) -> bytes:
    """Read so many bytes."""
    found = bytearray()
    while len(found) < count:
        part = line.recv(min(count - len(found), 1 << 16))
        if not part:
            raise ConnectionResetError("the connection was closed")
        found += part
    return bytes(found)
