"""Host memory that spills to the disk: the backend for a GPU whose host has less room than is offloaded.

Everything is copied to the host's pinned memory first, an arena of a fixed size. What was offloaded first, and so is
needed last, is written on to a file while the device computes; how much must be is known from the plan. In backward the
blocks of what was fetched are free, and what is on the disk is read into them, the latest first, before it is asked
for. So the host's memory is a window over a stack that goes down into the disk.

    offloaded   a b c d e f          arena of four:  a b c d | c d e f | c d . . | b . . . |
    on disk     a b                                  forward           backward

The host waits in two places: for a block of the arena, until something is written; and for bytes that are not read yet.
Neither can wait for the other, since the threads that read and write never wait for the computing. More in flight than
was planned spills too, the oldest first. On a CPU device the same runs with ordinary memory in place of pinned one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import torch

from outcore.memory.offload.arena import Arena, ArenaBlock
from outcore.memory.offload.copy_streams import CopyEvent, copy_streams_for
from outcore.memory.offload.host_storage import PinnedStorage
from outcore.memory.offload.scratch_file import ScratchFile
from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads


class SpillBackend:
    """Host memory of a fixed size, and a file behind it."""

    def __init__(self, device: torch.device, capacity_bytes: int, host_bytes: int) -> None:
        self.device = device
        self.copy_streams = copy_streams_for(device)
        self.arena = Arena(host_bytes)
        self.storage = PinnedStorage(self.arena.size) if device.type == "cuda" and self.arena.size else None
        self.memory = (
            self.storage.memory if self.storage else torch.empty(self.arena.size, dtype=torch.uint8, device="cpu")
        )
        self.over_bytes = max(0, capacity_bytes - host_bytes)
        """How much of a step is written on to the disk."""
        self.scratch = ScratchFile(self.over_bytes)
        self.writer, self.reader = WorkerThreads(1, "outcore-spill"), WorkerThreads(1, "outcore-fetch")
        self.buffers: list[weakref.ref[SpilledBuffer]] = []
        """Under way, in the order in which they left."""
        self.spilled_bytes = 0
        """Of this step so far."""

    def evict(self, flat: torch.Tensor) -> SpilledBuffer:
        """Start to copy bytes out, and on to the disk if they are among the first of the step."""
        self.buffers = [ref for ref in self.buffers if ref() is not None]
        if not self.buffers:
            self.spilled_bytes = 0
        buffer = SpilledBuffer(self, flat, self.make_room(flat.numel()))
        self.buffers.append(weakref.ref(buffer))
        if self.spilled_bytes < self.over_bytes:
            self.spilled_bytes += buffer.size
            buffer.spill()
        return buffer

    def make_room(self, size: int) -> ArenaBlock | None:
        """A block of the arena, once something there is written; None if `size` is more than can be had."""
        slot = self.arena.take(size)
        for buffer in self.alive() if slot is None else ():
            buffer.leave_arena()
            if (slot := self.arena.take(size)) is not None:
                break
        return slot

    def prefetch(self) -> None:
        """Read what backward will ask for next, as far as there is room."""
        for buffer in reversed(list(self.alive())):
            if buffer.on_disk and not buffer.stage():
                return

    def alive(self) -> Iterator[SpilledBuffer]:
        """The buffers that are offloaded, the oldest first."""
        return (buffer for ref in self.buffers if (buffer := ref()) is not None)

    def close(self) -> None:
        """Finish the copies and give everything back."""
        self.writer.close()
        self.reader.close()
        self.copy_streams.close()
        self.scratch.close()
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.storage is not None:
            self.storage.close()

    def __del__(self) -> None:
        if "spilled_bytes" in self.__dict__ and not sys.is_finalizing():
            self.close()


class SpilledBuffer:
    """A buffer in the arena, in the file, or in both."""

    def __init__(self, tier: SpillBackend, flat: torch.Tensor, slot: ArenaBlock | None) -> None:
        self.tier, self.size, self.slot = tier, flat.numel(), slot
        self.flat: torch.Tensor | None = None
        self.here: CopyEvent | None = None
        self.place: ArenaBlock | None = None
        self.writing: WorkerTask[None] | None = None
        self.reading: WorkerTask[None] | None = None
        self.host: torch.Tensor | None = self._memory()
        events = tier.arena.events(slot) if slot is not None else []
        (self.gone,) = tier.copy_streams.copy([(self.host, flat, (tier.copy_streams.now(), *events))], out=True)

    def _memory(self) -> torch.Tensor:
        """The memory of its block in the arena, or memory of its own where it has none."""
        if self.slot is None:
            return torch.empty(self.size, dtype=torch.uint8, device="cpu")
        return self.tier.memory[self.slot.offset : self.slot.offset + self.size]

    # Down to the disk

    def spill(self) -> None:
        """Start to write it to the disk, once it is on the host."""
        if self.place is None:
            assert self.host is not None
            self.place = self.tier.scratch.take(self.size)
            self.writing = self.tier.writer.submit(self._write, self.tier.scratch, self.gone, self.host, self.place)

    @staticmethod
    def _write(scratch: ScratchFile, gone: CopyEvent, host: torch.Tensor, place: ArenaBlock) -> None:
        gone.finish()
        scratch.write(host, place)

    def leave_arena(self) -> None:
        """Write it to the disk, wait for that, and give its block in the arena back."""
        if self.slot is None or self.flat is not None or self.reading is not None:
            return
        self.spill()
        assert self.writing is not None
        self.writing.result()
        slot, self.slot, self.host = self.slot, None, None
        self.tier.arena.give(slot)

    # Back up

    @property
    def on_disk(self) -> bool:
        """Whether it is on the disk only."""
        return self.host is None

    def stage(self, *, anyhow: bool = False) -> bool:
        """Start to read it into host memory, if there is room for it or if it must be (`anyhow`); returns whether it
        did."""
        slot = self.tier.arena.take(self.size)
        if slot is None and not anyhow:
            return False
        assert self.place is not None
        self.slot = slot
        self.host = self._memory()
        events = self.tier.arena.events(slot) if slot is not None else []
        self.reading = self.tier.reader.submit(self._read, self.tier.scratch, events, self.host, self.place)
        return True

    @staticmethod
    def _read(scratch: ScratchFile, events: list[CopyEvent], host: torch.Tensor, place: ArenaBlock) -> None:
        for event in events:
            event.finish()
        scratch.read(host, place)

    def wait_out(self) -> None:
        """Let the compute stream wait for the copy out."""
        self.gone.wait()

    def fetch(self) -> None:
        """Allocate memory on the device for it, and start to copy it there if it is on the host."""
        if self.flat is None:
            if self.on_disk:
                self.stage(anyhow=True)
            self.tier.prefetch()
            self.flat = torch.empty(self.size, dtype=torch.uint8, device=self.tier.device)
            self.asked = self.tier.copy_streams.now()
        if self.here is None and (self.reading is None or self.reading.over):
            self._copy_back()

    def _copy_back(self) -> None:
        if self.reading is not None:
            self.reading.result()
        assert self.flat is not None and self.host is not None
        (self.here,) = self.tier.copy_streams.copy([(self.flat, self.host, (self.asked, self.gone))], out=False)

    def bytes_back(self) -> torch.Tensor:
        """Its bytes on the device, after the copy back."""
        self.fetch()
        if self.here is None:
            self._copy_back()
        assert self.flat is not None and self.here is not None
        self.here.wait()
        flat, self.flat, self.used = self.flat, None, self.here
        self.here = None
        return flat

    used: CopyEvent | None = None
    """The last copy back."""

    def __del__(self) -> None:
        for task in (self.__dict__.get("writing"), self.__dict__.get("reading")):
            if task is not None:
                task.wait()
        if self.__dict__.get("here") is not None:
            assert self.here is not None
            self.here.wait()  # fetched in vain: whoever gets the memory next comes after the copy
        if self.__dict__.get("place") is not None:
            assert self.place is not None
            self.tier.scratch.give(self.place)
        if self.__dict__.get("slot") is not None:
            assert self.slot is not None
            self.tier.arena.give(self.slot, self.here or self.used or self.__dict__.get("gone"))
