"""The slower memory behind a device: the host's for a GPU, with the disk behind it
(`outcore.memory.offload.disk_spill`), the disk for a CPU.

A backend takes the raw bytes of a storage, so views and memory formats come back as they were. Copies run beside the
computing: on a GPU on a stream of their own each way, on a CPU on a thread each way. Both kinds keep what they hold in
one *arena* of the size the plan asks for, pinned once (registered memory, not torch's own pinned allocator, which
rounds up to powers of two), so that nothing is allocated while training.

Before memory on a GPU is freed, the copy out of it must be over. The host runs far ahead of the device, so it cannot
ask; instead the compute stream waits for the copy at a place the plan has chosen, and the memory is dropped there: no
`record_stream`, the same peak in every step.
"""

from __future__ import annotations

import _thread
import sys
import weakref
from typing import Protocol

import torch

from outcore.errors import OutcoreError
from outcore.memory.offload.arena import Arena, ArenaBlock
from outcore.memory.offload.disk_spill import SpillBackend
from outcore.memory.offload.host_limit import host_limit_bytes
from outcore.memory.offload.pinning import pin, unpin
from outcore.memory.offload.scratch_file import ScratchFile
from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads


class OffloadedBuffer(Protocol):
    """One buffer that is offloaded and fetched again."""

    def wait_out(self) -> None:
        """Let what is computed from here on come after the copy out."""

    def fetch(self) -> None:
        """Start to copy it back into new memory."""

    def bytes_back(self) -> torch.Tensor:
        """Its bytes on the device, after the copy back."""


class Backend(Protocol):
    """Where buffers are offloaded to."""

    device: torch.device
    """The device they are offloaded from."""

    def evict(self, flat: torch.Tensor) -> OffloadedBuffer:
        """Start to copy bytes out."""

    def close(self) -> None:
        """Give everything back."""


def tier_for(device: torch.device, capacity_bytes: int) -> Backend:
    """The backend for a device, with room for so many bytes."""
    if device.type != "cuda":
        return DiskBackend(capacity_bytes)
    if capacity_bytes > (room := host_limit_bytes()):
        return SpillBackend(device, capacity_bytes, room)
    return HostBackend(device, capacity_bytes)


# Below a GPU


class HostBackend:
    """Pinned host memory."""

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        arena = Arena(capacity_bytes)
        capacity_bytes = arena.size
        try:
            self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise OutcoreError(
                f"the plan needs {capacity_bytes / 2**30:.2f} GiB of host memory, which is not there; plan with less"
            ) from error
        if refused := pin(self.memory.data_ptr(), capacity_bytes):
            raise OutcoreError(f"{capacity_bytes / 2**30:.2f} GiB of host memory could not be pinned ({refused})")
        self.arena = arena
        self.buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()

    def evict(self, flat: torch.Tensor) -> HostBuffer:
        """Start to copy bytes out, after what the compute stream has done so far."""
        buffer = HostBuffer(self, flat)
        self.buffers.add(buffer)
        return buffer

    def settle(self) -> None:
        """Note that the compute stream comes after every copy out so far; a CUDA graph must not wait for an event of
        another graph."""
        for buffer in self.buffers:
            buffer.gone = None

    def empty(self) -> None:
        """Start with an empty arena, after all copies are over, so that no event of an earlier buffer is waited for."""
        torch.cuda.synchronize(self.device)
        self.arena = Arena(self.arena.size)

    def close(self) -> None:
        """Unpin the arena, after the copies that are under way."""
        if self.memory.numel():
            with torch.cuda.device(self.device):
                unpin(self.memory.data_ptr())
            self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __del__(self) -> None:
        if "arena" in self.__dict__ and not sys.is_finalizing():
            self.close()


class HostBuffer:
    """A buffer in pinned host memory."""

    def __init__(self, tier: HostBackend, flat: torch.Tensor) -> None:
        self.tier, self.size = tier, flat.numel()
        self.flat: torch.Tensor | None = None
        self.gone: torch.cuda.Event | None = None
        self.here: torch.cuda.Event | None = None
        self.slot: ArenaBlock | None = tier.arena.take(self.size)
        self.host = (
            tier.memory[self.slot.offset : self.slot.offset + self.size]
            if self.slot is not None
            else torch.empty(self.size, dtype=torch.uint8, pin_memory=True, device="cpu")  # more in flight than planned
        )
        ready = torch.cuda.current_stream(tier.device).record_event()
        tier.out.wait_event(ready)
        if self.slot is not None:
            for event in tier.arena.events(self.slot):
                tier.out.wait_event(event)
        with torch.cuda.stream(tier.out):
            self.host.copy_(flat, non_blocking=True)
        self.gone = tier.out.record_event()

    def wait_out(self) -> None:
        """Let the compute stream wait for the copy out."""
        if self.gone is not None:
            torch.cuda.current_stream(self.tier.device).wait_event(self.gone)

    def fetch(self) -> None:
        """Start to copy it back, into memory of the compute stream."""
        if self.flat is not None:
            return
        tier = self.tier
        self.into = torch.cuda.current_stream(tier.device)
        self.flat = torch.empty(self.size, dtype=torch.uint8, device=tier.device)
        tier.back.wait_event(self.into.record_event())
        if self.gone is not None:
            tier.back.wait_event(self.gone)
        with torch.cuda.stream(tier.back):
            self.flat.copy_(self.host, non_blocking=True)
        self.here = tier.back.record_event()

    def bytes_back(self) -> torch.Tensor:
        """Let the compute stream wait for the copy back."""
        self.fetch()
        assert self.flat is not None and self.here is not None
        torch.cuda.current_stream(self.tier.device).wait_event(self.here)
        flat, self.flat = self.flat, None
        return flat

    def __del__(self) -> None:
        if getattr(self, "flat", None) is not None and self.here is not None:
            self.into.wait_event(self.here)  # fetched in vain: whoever gets the memory next comes after the copy
        if getattr(self, "slot", None) is not None:
            assert self.slot is not None
            self.tier.arena.give(self.slot, self.here if self.here is not None else self.gone)


# Below a CPU


class DiskBackend:
    """A scratch file."""

    def __init__(self, capacity_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.workers = WorkerThreads(2, "outcore-disk")
        self.scratch = ScratchFile(capacity_bytes)

    @property
    def arena(self) -> Arena:
        """What of the file is free."""
        return self.scratch.arena

    def evict(self, flat: torch.Tensor) -> DiskBuffer:
        """Start to write bytes."""
        return DiskBuffer(self, flat)

    def close(self) -> None:
        """Finish the copies and give the disk space back."""
        self.workers.close()
        self.scratch.close()

    def __del__(self) -> None:
        if "scratch" in self.__dict__:
            self.close()


class DiskBuffer:
    """A buffer in the scratch file."""

    def __init__(self, tier: DiskBackend, flat: torch.Tensor) -> None:
        self.tier, self.size = tier, flat.numel()
        self.writing: WorkerTask[None] | None = None  # all there from the start, since Ctrl-C may come at any line
        self.reading: WorkerTask[torch.Tensor] | None = None
        self.slot: ArenaBlock | None = tier.scratch.take(self.size)
        self.arena = tier.scratch.arena  # in a process that is forked later the file and its arena are others
        self.writing = tier.workers.submit(tier.scratch.write, flat, self.slot)

    def wait_out(self) -> None:
        """Wait until the bytes are written."""
        assert self.writing is not None
        self.writing.result()

    def fetch(self) -> None:
        """Start to read it back."""
        if self.reading is None:
            self.wait_out()
            assert self.slot is not None
            flat = torch.empty(self.size, dtype=torch.uint8, device="cpu")
            self.reading = self.tier.workers.submit(self.tier.scratch.read, flat, self.slot)

    def bytes_back(self) -> torch.Tensor:
        """Wait until the bytes are here."""
        self.fetch()
        assert self.reading is not None
        flat, self.reading = self.reading.result(), None
        return flat

    def __del__(self) -> None:
        try:
            self._give_back()
        except KeyboardInterrupt:  # lost if raised here; a copy thread raises it again a little later
            self._give_back()
            self.tier.workers.submit(_thread.interrupt_main)

    def _give_back(self) -> None:
        if getattr(self, "slot", None) is not None:
            for task in (self.reading, self.writing):
                if task is not None:
                    task.wait()
            slot, self.slot = self.slot, None
            assert slot is not None
            self.arena.give(slot)
