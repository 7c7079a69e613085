"""Memory that ranks of one host see together, so that tensors between them need no socket.

Through a socket every byte is copied into the kernel and out again, at little more than a gigabyte per second. Here the
sender writes a tensor into a row of shared memory and sends only the name of the row, through a pipe (`HostPipes`); the
receiver maps it and uses the bytes where they are. A flag at the end of the row says that it is in use: the sender sets
it when it takes the row, the receiver clears it when the last tensor over the row is gone. So the sender never holds
more rows than are in flight or kept for a backward, and both replicas of GEMS share them. A tensor of a few hundred
numbers goes through the pipe itself.

A row is a memfd: it has no name in a file system, other ranks open it through /proc of its owner, and it is gone with
the last process that maps it, however that ends; nothing can be left behind. Ranks try once whom they reach in this
way; everybody else is reached through sockets. On a GPU the rows are registered, so that copies to and from the device
run at full speed beside kernels.

Where memory is counted, a row counts for the rank that reads it while it does, as a tensor; rows that nobody uses are
`idle_bytes`, as an allocator's free lists are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from outcore.memory.offload.pinning import pin
from outcore.run.ranks.world import World
from outcore.run.transport.pipes import HostPipes, IncomingPipe, OutgoingPipe

INLINE_BYTES = 2048
"""Tensors on the host that are no larger go through the pipe."""

_ALIGNED = 64
_NAME = struct.Struct("<qi")  # which of the sender's rows, and its file


class _Mapping:
    """A row as one process maps it: the bytes, then the flag."""

    def __init__(self, fd: int, nbytes: int, device: torch.device) -> None:
        self.at = -(-nbytes // _ALIGNED) * _ALIGNED
        self.memory = mmap.mmap(fd, self.at + _ALIGNED)
        self.nbytes, self._registered = nbytes, False
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=max(1, nbytes))[:nbytes]
        if device.type == "cuda":
            self._registered = _register(self.tensor.data_ptr(), self.at + _ALIGNED)

    @property
    def in_use(self) -> bool:
        return self.memory[self.at] != 0

    def mark(self, in_use: bool) -> None:
        self.memory[self.at] = int(in_use)

    def lease(self) -> torch.Tensor:
        """A tensor over the bytes; the flag is cleared when nothing holds its memory any more."""
        view = memoryview(self.memory)[: max(1, self.nbytes)]
        weakref.finalize(view, self.mark, False).atexit = False
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
    name: bytes
    """The name that is sent to the receiver."""


@dataclass(slots=True)
class _Own:
    mapping: _Mapping
    fd: int
    name: bytes


class SharedRows:
    """The shared rows of one rank: those it sends from, and those of others that it reads."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._device, self._watched_wait = device, world.watched_wait
        self._rows: dict[int, list[_Own]] = {}
        self._read: dict[tuple[int, int], _Mapping] = {}
        self._used: set[int] = set()
        self._count = 0
        self._lock = threading.Lock()
        self._pids, self._pipes, self.shared_memory_ranks = self._meet(world)
        """Ranks that are reached through shared memory, in both directions."""

    def reaches(self, rank: int) -> bool:
        """Whether tensors are exchanged with a rank through shared memory."""
        return rank in self.shared_memory_ranks

    def send(self, flat: torch.Tensor, target: int, tag: int) -> None:
        """Send the bytes of a tensor, which may be changed as soon as this returns."""
        if self._is_inline(flat.nbytes):
            self._pipes.send(target, tag, flat.numpy().tobytes())
            return
        row = self.take(flat.nbytes)
        row.tensor.copy_(flat)
        self.send_row(row, target, tag)

    def send_row(self, row: SharedRow, target: int, tag: int) -> None:
        """Send a row that is filled."""
        self._pipes.send(target, tag, row.name)

    def receive(self, source: int, tag: int, nbytes: int) -> torch.Tensor:
        """So many bytes that a rank sends, once they are there; their row is free when the last tensor over it is
        gone."""
        message = self._pipes.receive(source, tag, self._watched_wait.limited(f"rank {source}"))
        if not self._is_inline(nbytes):
            return self._open(source, message, nbytes)
        return torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[:nbytes]

    def flush(self) -> bool:
        """Whether all that was sent has left; what a full pipe did not take before is tried again."""
        return self._pipes.flush()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._pipes.finish(self._watched_wait.limited("a rank that is sent something"))

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
        own.mapping.mark(True)
        return SharedRow(own.mapping.tensor, own.name)

    def _open(self, source: int, name: bytes, nbytes: int) -> torch.Tensor:
        serial, fd = _NAME.unpack(name)
        with self._lock:
            self._used.add(nbytes)
            mapping = self._read.get((source, serial))
            if mapping is None:
                mapping = self._read[source, serial] = _mapped(self._pids[source], fd, nbytes, self._device)
        return mapping.lease()

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

    def close(self) -> None:
        """Drop all rows."""
        self._pipes.close()
        self._used.clear()
        self.end_step()
        self.shared_memory_ranks = frozenset()

    def _make(self, nbytes: int) -> _Own:
        fd = _memfd(-(-nbytes // _ALIGNED) * _ALIGNED + _ALIGNED)
        self._count += 1
        return _Own(_Mapping(fd, nbytes, self._device), fd, _NAME.pack(self._count, fd))

    def _drop(self, nbytes: int) -> None:
        for own in self._rows.pop(nbytes):
            own.mapping.forget()
            os.close(own.fd)

    def _meet(self, world: World) -> tuple[dict[int, int], HostPipes, frozenset[int]]:
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
                        incoming[rank] = IncomingPipe(pid, pipes[str(world.rank)])
        table = world.share([rank in incoming for rank in range(world.size)])
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
        return pids, HostPipes({rank: outgoing[rank] for rank in near}, incoming), near

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
