"""Memory that ranks of one host see together, so that tensors between them need no socket.

Through a socket every byte is copied into the kernel and out again, at little more than a gigabyte per second. Here the
sender writes a tensor into a row of shared memory and sends only the name of the row; the receiver maps it and uses the
bytes where they are. A flag at the end of the row says that it is in use: the sender sets it when it takes the row, the
receiver clears it when the last tensor over the row is gone. So the sender never holds more rows than are in flight or
kept for a backward, and both replicas of GEMS share them.

A row is a memfd: it has no name in a file system, other ranks open it through /proc of its owner, and it is gone with
the last process that maps it, however that ends; nothing can be left behind. Ranks try once whom they reach in this
way; everybody else, and everything small, goes through sockets. On a GPU the rows are registered, so that copies to and
from the device run at full speed beside kernels.

Where memory is counted, a row counts for the rank that reads it while it does, as a tensor; rows that nobody uses are
`idle_bytes`, as an allocator's free lists are.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from outcore.memory.offload.pinning import pin
from outcore.run.ranks.world import World

LEAST_BYTES = 16 * 1024
"""Smaller tensors go through sockets: a name is not much shorter."""

_ALIGNED = 64


class _Mapping:
    """A row as one process maps it: the bytes, then the flag."""

    def __init__(self, fd: int, nbytes: int, device: torch.device) -> None:
        self.at = -(-nbytes // _ALIGNED) * _ALIGNED
        self.memory = mmap.mmap(fd, self.at + _ALIGNED)
        self.nbytes, self._registered = nbytes, False
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes)
        if device.type == "cuda":
            self._registered = _register(self.tensor.data_ptr(), self.at + _ALIGNED)

    @property
    def in_use(self) -> bool:
        return self.memory[self.at] != 0

    def mark(self, in_use: bool) -> None:
        self.memory[self.at] = int(in_use)

    def lease(self) -> torch.Tensor:
        """A tensor over the bytes; the flag is cleared when nothing holds its memory any more."""
        view = memoryview(self.memory)[: self.nbytes]
        weakref.finalize(view, self.mark, False).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def forget(self) -> None:
        """End the registration; the mapping itself goes with the last tensor over it."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._registered = False


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A row that a sender may fill."""

    tensor: torch.Tensor
    name: torch.Tensor
    """The name that is sent to the receiver."""


@dataclass(slots=True)
class _Own:
    mapping: _Mapping
    fd: int
    name: torch.Tensor


class SharedRows:
    """The shared rows of one rank: those it sends from, and those of others that it reads."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, list[_Own]] = {}
        self._read: dict[tuple[int, int], _Mapping] = {}
        self._used: set[int] = set()
        self._count = 0
        self._lock = threading.Lock()
        self._pids, self.shared_memory_ranks = self._meet(world)
        """Ranks that are reached through shared memory, in both directions."""

    def reaches(self, rank: int, nbytes: int) -> bool:
        """Whether a tensor of this size is exchanged with a rank through shared memory."""
        return nbytes >= LEAST_BYTES and rank in self.shared_memory_ranks

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

    def open(self, source: int, name: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The tensor that a rank has sent; its row is free when the last tensor over it is gone."""
        serial, fd = name.tolist()
        with self._lock:
            self._used.add(nbytes)
            mapping = self._read.get((source, serial))
            if mapping is None:
                mapping = self._read[source, serial] = _open(self._pids[source], fd, nbytes, self._device)
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
        self._used.clear()
        self.end_step()
        self.shared_memory_ranks = frozenset()

    def _make(self, nbytes: int) -> _Own:
        fd = _memfd(-(-nbytes // _ALIGNED) * _ALIGNED + _ALIGNED)
        self._count += 1
        return _Own(_Mapping(fd, nbytes, self._device), fd, torch.tensor([self._count, fd], device="cpu"))

    def _drop(self, nbytes: int) -> None:
        for own in self._rows.pop(nbytes):
            own.mapping.forget()
            os.close(own.fd)

    def _meet(self, world: World) -> tuple[dict[int, int], frozenset[int]]:
        """Try which ranks this one can reach, and which reach it; collective."""
        secret = secrets.token_bytes(_ALIGNED)
        try:
            fd = _memfd(2 * _ALIGNED)
        except (AttributeError, OSError):  # not on this system
            fd = -1
        probe = _Mapping(fd, _ALIGNED, self._device) if fd >= 0 else None
        if probe is not None:
            probe.memory[:_ALIGNED] = secret
        shared = world.share([os.uname().nodename, os.getpid(), fd, secret.hex()])
        mine = [
            rank != world.rank and probe is not None and host == os.uname().nodename and self._sees(*row)
            for rank, (host, *row) in enumerate(shared)
        ]
        table = world.share(mine)
        if probe is not None:
            probe.forget()
            os.close(fd)
        pids = {rank: row[1] for rank, row in enumerate(shared)}
        return pids, frozenset(r for r in range(world.size) if mine[r] and table[r][world.rank])

    def _sees(self, pid: int, fd: int, secret: str) -> bool:
        if fd < 0:
            return False
        try:
            mapping = _open(pid, fd, _ALIGNED, self._device)
        except OSError:
            return False
        seen = mapping.memory[:_ALIGNED].hex() == secret
        mapping.forget()
        return seen


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("outcore")
    os.ftruncate(fd, nbytes)
    return fd


def _open(pid: int, fd: int, nbytes: int, device: torch.device) -> _Mapping:
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
