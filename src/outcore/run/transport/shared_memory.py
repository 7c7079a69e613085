"""Memory that ranks of one host see together, so that tensors between them need no socket.

Through a socket every byte is copied into the kernel and out again, at little more than a gigabyte per second. Here the
sender writes a tensor into a row of shared memory and sends only the name of the row, through a pipe (`Channels`); the
receiver maps it and uses the bytes where they are. Flags at the end of the row say that it is in use, one for each
reader: the sender sets it when it sends the row, the reader clears it when its last tensor over the row is gone. So the
sender never holds more rows than are in flight or kept for a backward, and both replicas of GEMS share them. A flag
also tells whether its reader has mapped the row yet, for which a sender that leaves waits. A tensor of a few hundred
numbers goes through the pipe itself.

A row is a memfd: it has no name in a file system, other ranks open it through /proc of its owner, and it is gone with
the last process that maps it, however that ends; nothing can be left behind. Ranks try once whom they reach in this
way; everybody else is reached through sockets, tensors of at most `MOST_BYTES` between host memories through our own
(`outcore.run.transport.sockets`), all others through gloo's. On a GPU the rows are registered, so that copies to and
from the device run at full speed beside kernels.

Where memory is counted, a row counts for the rank that reads it while it does, as a tensor; rows that nobody uses are
`idle_bytes`, as an allocator's free lists are.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from outcore.memory.offload.pinning import pin
from outcore.run.ranks.world import World
from outcore.run.transport.channels import MOST_BYTES, Channels
from outcore.run.transport.pipes import OutgoingPipe, incoming_pipe
from outcore.run.transport.sockets import channels_of, connect_ranks
from outcore.run.transport.watched_wait import LOOK_S

INLINE_BYTES = 2048
"""Tensors on the host that are no larger go through the pipe."""

_EXCHANGES = 1 << 40
"""The first tag above those of everything else."""
_ADD_BYTES = 1 << 20
"""A row that ranks of several hosts add up by themselves: a larger one gloo moves while they compute."""
_ALIGNED = 64
_MOST_READERS = _ALIGNED
"""Of one row at a time."""
_FREE, _SENT, _READ = 0, 1, 2
"""States of a reader's flag: it needs the row no longer, it was told of it, it has mapped it."""
_NAME = struct.Struct("<qii")  # which of the sender's rows, its file, and the reader's flag


class Layout(Protocol):
    """How a tensor lies in a row of bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the row."""

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a tensor in this layout, as one row."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor in this layout over a row of bytes."""


class _Mapping:
    """A row as one process maps it: the bytes, then the flags."""

    def __init__(self, fd: int, nbytes: int, device: torch.device) -> None:
        self.at = -(-nbytes // _ALIGNED) * _ALIGNED
        self.memory = mmap.mmap(fd, self.at + _ALIGNED)
        self.nbytes, self._registered = nbytes, False
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=max(1, nbytes))[:nbytes]
        if device.type == "cuda":
            self._registered = _register(self.tensor.data_ptr(), self.at + _ALIGNED)

    @property
    def in_use(self) -> bool:
        return any(self.memory[self.at : self.at + _ALIGNED])

    @property
    def is_awaited(self) -> bool:
        """Whether a reader that was told of it has not come yet."""
        return _SENT in self.memory[self.at : self.at + _ALIGNED]

    def mark(self, flag: int, state: int) -> None:
        self.memory[self.at + flag] = state

    def lease(self, flag: int) -> torch.Tensor:
        """A tensor over the bytes; the flag is cleared when nothing holds its memory any more."""
        self.mark(flag, _READ)
        view = memoryview(self.memory)[: max(1, self.nbytes)]
        weakref.finalize(view, self.mark, flag, _FREE).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[: self.nbytes]

    def forget(self) -> None:
        """End the registration; the mapping itself goes with the last tensor over it."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._registered = False


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A row that a sender may fill."""

    tensor: torch.Tensor
    own: _Own


@dataclass(slots=True)
class _Own:
    """A row of this rank's."""

    mapping: _Mapping
    fd: int
    serial: int


class SharedRows:
    """The shared rows of one rank: those it sends from, and those of others that it reads."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._rank, self._size, self._device = world.rank, world.size, device
        self._watched_wait = world.watched_wait
        self._exchanges = 0
        self._rows: dict[int, list[_Own]] = {}
        self._read: dict[tuple[int, int], _Mapping] = {}
        self._used: set[int] = set()
        self._count = 0
        self._lock = threading.Lock()
        self._table: list[list[bool]] = []
        """Who reads whose memory, by reader and owner; the same on every rank."""
        self._sockets: list[list[int]] = [[] for _ in range(world.size)]
        """To which lower ranks each has a socket; the same on every rank."""
        self._pids, self._channels, self.shared_memory_ranks = self._meet(world)
        """Ranks that are reached through shared memory, in both directions."""
        self.socket_ranks = self._connect_apart(world) if device.type == "cpu" else frozenset[int]()
        """Ranks of other hosts to which there is a channel."""

    def reaches(self, rank: int) -> bool:
        """Whether tensors are exchanged with a rank through shared memory."""
        return rank in self.shared_memory_ranks

    def carries(self, rank: int, nbytes: int) -> bool:
        """Whether a tensor of that size is exchanged with a rank without gloo."""
        return rank in self.shared_memory_ranks or (nbytes <= MOST_BYTES and rank in self.socket_ranks)

    def connect(self, ranks: Sequence[int], nbytes: int) -> bool:
        """Whether so many bytes are added up among these ranks without gloo; every one of them gets the same
        answer."""
        reached = {self._rank, *self.shared_memory_ranks, *self.socket_ranks}
        if not 1 < len(ranks) <= _MOST_READERS or not reached.issuperset(ranks):
            return False
        pairs = [(a, b) for a, b in itertools.combinations(sorted(ranks), 2) if not self._table[a][b]]
        return not pairs or (nbytes <= _ADD_BYTES and all(a in self._sockets[b] for a, b in pairs))

    def send(self, tensor: torch.Tensor, layout: Layout, target: int, tag: int) -> None:
        """Send a tensor on the host in some layout; it may be changed as soon as this returns."""
        if self._is_inline(layout.nbytes) or target in self.socket_ranks:
            self.send_to(layout.flat(tensor).view(torch.uint8), [target], tag)
            return
        row = self.take(layout.nbytes)
        layout.view(row.tensor).copy_(tensor)
        self.send_row(row, target, tag)

    def send_to(self, flat: torch.Tensor, targets: Sequence[int], tag: int) -> None:
        """Send the bytes of a tensor to several ranks; it may be changed as soon as this returns."""
        small = self._is_inline(flat.nbytes)
        whole = [target for target in targets if small or target in self.socket_ranks]
        if whole:
            payload = flat.numpy()
            for target, at in itertools.product(whole, range(0, max(1, len(payload)), MOST_BYTES)):
                self._channels.send(target, tag, payload[at : at + MOST_BYTES].tobytes())
        if by_name := [target for target in targets if target not in whole]:
            row = self.take(flat.nbytes)
            row.tensor.copy_(flat)
            self.send_row_to(row, by_name, tag)

    def send_row(self, row: SharedRow, target: int, tag: int) -> None:
        """Send a row that is filled."""
        self.send_row_to(row, [target], tag)

    def send_row_to(self, row: SharedRow, targets: Sequence[int], tag: int) -> None:
        """Send a row that is filled to several ranks, each of which has a flag of its own."""
        own = row.own
        for flag in range(len(targets)):
            own.mapping.mark(flag, _SENT)  # all of them before the first reader clears its own
        for flag, target in enumerate(targets):
            self._channels.send(target, tag, _NAME.pack(own.serial, own.fd, flag))

    def receive(self, source: int, tag: int, nbytes: int) -> torch.Tensor:
        """So many bytes that a rank sends, once they are there; their row is free when the last tensor over it is
        gone."""
        look = self._watched_wait.limited(f"rank {source}")
        message = self._channels.receive(source, tag, look)
        if not self._is_inline(nbytes) and source not in self.socket_ranks:
            return self._open(source, message, nbytes)
        found = bytearray(message or b"\0")
        while len(found) < nbytes:
            found += self._channels.receive(source, tag, look)
        return torch.frombuffer(found, dtype=torch.uint8)[:nbytes]

    def exchange(self, payload: bytes) -> Callable[[], list[bytes]]:
        """Start to exchange a few bytes with all ranks, which all have channels to each other; returns a function that
        waits for theirs, by rank. Every rank starts them in one order."""
        self._exchanges += 1
        tag = _EXCHANGES + self._exchanges
        for rank in range(self._size):
            if rank != self._rank:
                self._channels.send(rank, tag, payload)

        def wait() -> list[bytes]:
            return [payload if rank == self._rank else self._message(rank, tag) for rank in range(self._size)]

        return wait

    def _message(self, source: int, tag: int) -> bytes:
        return self._channels.receive(source, tag, self._watched_wait.limited(f"rank {source}"))

    def flush(self) -> bool:
        """Whether all that was sent has left; what a full channel did not take before is tried again."""
        return self._channels.flush()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._channels.finish(self._watched_wait.limited("a rank that is sent something"))

    def _is_inline(self, nbytes: int) -> bool:
        return nbytes <= INLINE_BYTES and self._device.type == "cpu"

    def take(self, nbytes: int) -> SharedRow:
        """A row to fill and send; it is free again when the receiver has released it."""
        self._used.add(nbytes)
        rows = self._rows.setdefault(nbytes, [])
        own = next((row for row in rows if not row.mapping.in_use), None)
        if own is None:
            own = self._make(nbytes)
            rows.append(own)
        own.mapping.mark(0, _READ)  # by whoever fills it
        return SharedRow(own.mapping.tensor, own)

    def _open(self, source: int, name: bytes, nbytes: int) -> torch.Tensor:
        serial, fd, flag = _NAME.unpack(name)
        with self._lock:
            self._used.add(nbytes)
            mapping = self._read.get((source, serial))
            if mapping is None:
                mapping = self._read[source, serial] = _mapped(self._pids[source], fd, nbytes, self._device)
        return mapping.lease(flag)

    @property
    def sent_rows(self) -> list[torch.Tensor]:
        """The rows this rank sends from; they count as memory of the ranks that read them."""
        return [own.mapping.tensor for rows in self._rows.values() for own in rows]

    @property
    def idle_bytes(self) -> int:
        """Bytes of the rows this rank reads from that are not in use now."""
        return sum(mapping.nbytes for mapping in self._read.values() if not mapping.in_use)

    def end_step(self) -> None:
        """Drop rows of sizes that a whole step did not use."""
        for key in [k for k, mapping in self._read.items() if mapping.nbytes not in self._used]:
            self._read.pop(key).forget()
        for nbytes in self._rows.keys() - self._used:
            self._drop(nbytes)
        self._used.clear()

    def wait_for_readers(self) -> None:
        """Wait until all rows that were sent are mapped by those who read them: they find them by this process's files,
        which are gone when it leaves."""
        look, looked = self._watched_wait.limited("a rank that is sent something"), time.monotonic()
        while any(own.mapping.is_awaited for rows in self._rows.values() for own in rows):
            self._channels.flush()
            time.sleep(0.0005)
            if time.monotonic() - looked > LOOK_S:
                look()
                looked = time.monotonic()

    def close(self) -> None:
        """Drop all rows."""
        self._channels.close()
        self._used.clear()
        self.end_step()
        self.shared_memory_ranks = self.socket_ranks = frozenset()

    def _make(self, nbytes: int) -> _Own:
        fd = _memfd(-(-nbytes // _ALIGNED) * _ALIGNED + _ALIGNED)
        self._count += 1
        return _Own(_Mapping(fd, nbytes, self._device), fd, self._count)

    def _drop(self, nbytes: int) -> None:
        for own in self._rows.pop(nbytes):
            own.mapping.forget()
            os.close(own.fd)

    def _meet(self, world: World) -> tuple[dict[int, int], Channels, frozenset[int]]:
        """Try which ranks this one can reach, and which reach it; collective."""
        secret = secrets.token_bytes(_ALIGNED)
        try:
            fd = _memfd(2 * _ALIGNED)
            outgoing = {rank: OutgoingPipe() for rank in range(world.size) if rank != world.rank}
        except (AttributeError, OSError):  # not on this system
            fd, outgoing = -1, {}
        probe = _Mapping(fd, _ALIGNED, self._device) if fd >= 0 else None
        if probe is not None:
            probe.memory[:_ALIGNED] = secret
        ends = {str(rank): pipe.reading for rank, pipe in outgoing.items()}
        shared = world.share([os.uname().nodename, os.getpid(), fd, secret.hex(), ends])
        incoming = {}
        for rank, (host, pid, theirs, token, pipes) in enumerate(shared):
            if rank != world.rank and probe is not None and host == os.uname().nodename:
                with contextlib.suppress(OSError, KeyError):
                    if self._sees(pid, theirs, token):
                        incoming[rank] = incoming_pipe(pid, pipes[str(world.rank)])
        self._table = table = world.share([rank in incoming for rank in range(world.size)])
        if probe is not None:
            probe.forget()
            os.close(fd)
        pids = {rank: row[1] for rank, row in enumerate(shared)}
        near = frozenset(rank for rank in incoming if table[rank][world.rank])
        for rank, pipe in outgoing.items():
            pipe.handed_over()
            if rank not in near:
                pipe.close()
        for rank in incoming.keys() - near:
            incoming.pop(rank).close()
        return pids, Channels({rank: outgoing[rank] for rank in near}, incoming), near

    def _connect_apart(self, world: World) -> frozenset[int]:
        """Connect to ranks that are not reached through shared memory; collective wherever any rank has such."""
        everyone = frozenset(range(world.size))
        if all(map(all, (row[:rank] + row[rank + 1 :] for rank, row in enumerate(self._table)))):
            return frozenset()
        found, self._sockets = connect_ranks(world, everyone - self.shared_memory_ranks - {world.rank})
        for rank, line in found.items():
            self._channels.add(rank, *channels_of(line))
        return frozenset(found)

    def _sees(self, pid: int, fd: int, secret: str) -> bool:
        if fd < 0:
            return False
        mapping = _mapped(pid, fd, _ALIGNED, self._device)
        seen = mapping.memory[:_ALIGNED].hex() == secret
        mapping.forget()
        return seen


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("outcore")
    os.ftruncate(fd, nbytes)
    return fd


def _mapped(pid: int, fd: int, nbytes: int, device: torch.device) -> _Mapping:
    path = Path(f"/proc/{pid}/fd/{fd}")
    if not str(path.readlink()).startswith("/memfd:outcore"):
        raise OSError(f"{path} is not a row")
    here = os.open(path, os.O_RDWR)
    try:
        return _Mapping(here, nbytes, device)
    finally:
        os.close(here)


def _register(pointer: int, nbytes: int) -> bool:
    """Let a GPU copy from and to memory directly; without it copies are slower, not wrong."""
    return not pin(pointer, nbytes)
