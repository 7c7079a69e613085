"""A rank's connection to the rendezvous store (`outcore.run.ranks.store`).

It is a `torch.distributed.Store`, so gloo connects through it as well. Every operation ends in bounded time: a server
that has stopped (a frozen machine, SIGSTOP) is an error after `SILENT_S` seconds, where torch's own client waits for
ever. A connection that broke is made again with the next operation, so a server that was only slow does no harm.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from outcore.errors import EngineError
from outcore.run.ranks.store import SILENT_S, enter, receive, send


class StoreClient(dist.Store):  # type: ignore[name-defined]
    """A rank's connection to the store; safe to use from several threads.

    Args:
        secret: of the run.
        address: of the server, and its `port`.
        timeout_s: how long to wait for a key.
        is_there: whether the server was there before this process: then it is not waited for longer than for an answer.
        prefix: of all keys.
    """

    def __init__(
        self, secret: str, address: str, port: int, *, timeout_s: float, is_there: bool = False, prefix: str = ""
    ) -> None:
        super().__init__()
        self.address, self.port, self.prefix = address, port, prefix
        self.secret, self._timeout_s = secret, timeout_s
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._closed = False
        self.own_address = ""
        """Of this end of the connection."""
        self._line = self._connect(min(timeout_s, 2 * SILENT_S) if is_there else timeout_s)

    def another(self, prefix: str = "") -> StoreClient:
        """A further connection, so that a wait on this one blocks nobody else."""
        where = (self.secret, self.address, self.port)
        return StoreClient(*where, timeout_s=self._timeout_s, is_there=True, prefix=f"{self.prefix}{prefix}")

    def close(self) -> None:
        """Disconnect; an operation of another thread ends with an error."""
        self._closed = True
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    # What torch asks of a store

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._ask("set", [key], _bytes(value))

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._waited("get", [key], self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._waited("wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._ask("check", keys) == b"1"

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        return int(self._ask("add", [key], b"%d" % amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Store a value if the one there is as expected ("" for none); returns what is there then."""
        return self._ask("compare", [key], _bytes(desired), expected=_bytes(expected).decode())

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether there was one."""
        return self._ask("delete", [key]) == b"1"

    def num_keys(self) -> int:
        """The number of keys of all prefixes."""
        return int(self._ask("count", [""]))

    # More than torch asks

    def ages(self, key: str) -> dict[str, tuple[float, str]]:
        """For all keys that begin with `key`: how long ago they were set, in seconds, and their values."""
        rows = json.loads(self._ask("ages", [key]))
        return {k.removeprefix(self.prefix): (float(age), str(value)) for k, (age, value) in rows.items()}

    def _waited(self, do: str, keys: list[str], timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            slice_s = min(1.0, left)  # the lock is not held for longer
            answer = self._request(do, keys, b"", {"timeout_s": slice_s})
            if answer[:1] == b"=":
                return answer[1:]
            if answer[:1] == b"!":
                raise EngineError(answer[1:].decode(errors="replace"))
        raise dist.DistStoreError(f"{keys[0]} did not come within {timeout_s:.0f} s")

    def _ask(self, do: str, keys: list[str], value: bytes = b"", **more: Any) -> bytes:
        return self._request(do, keys, value, more)[1:]

    def _request(self, do: str, keys: list[str], value: bytes, more: dict[str, Any]) -> bytes:
        head = {"do": do, "keys": [self.prefix + key for key in keys], **more}
        with self._lock:
            if self._closed:
                raise ConnectionError("this rank has left the store")
            line = self._line = self._line or self._again()
            try:
                send(line, json.dumps(head).encode() + b"\n" + value)
                return receive(line)
            except (OSError, ValueError) as error:
                line.close()  # an answer may still come; it would be taken for another's
                self._line = None
                raise ConnectionError(f"the store at {self.address}:{self.port} does not answer: {error}") from error

    def _again(self) -> socket.socket:
        """Reconnect to a server that was there: tried once, whoever asks may ask again."""
        try:
            return self._entered(SILENT_S)
        except OSError as error:
            raise ConnectionError(f"the store at {self.address}:{self.port} does not answer: {error}") from error

    def _connect(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._entered(min(SILENT_S, max(1.0, deadline - time.monotonic())))
            except OSError as error:
                if self._closed or time.monotonic() > deadline:
                    raise ConnectionError(f"no store at {self.address}:{self.port}: {error}") from error
            time.sleep(0.05)

    def _entered(self, timeout_s: float) -> socket.socket:
        line = socket.create_connection((self.address, self.port), timeout=timeout_s)
        try:
            line.settimeout(SILENT_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not enter(line, self.secret.encode()):
                raise EngineError(
                    f"the store at {self.address}:{self.port} does not know this run's secret; start all ranks with "
                    "the same OUTCORE_SECRET, and with a MASTER_PORT that no other run uses"
                )
        except BaseException:
            line.close()
            raise
        self.own_address = line.getsockname()[0]
        return line


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
