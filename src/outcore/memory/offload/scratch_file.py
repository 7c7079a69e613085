"""A file for bytes that have no room in memory.

It is unlinked as soon as it is open, so it is gone when the process is, however that ends. Its space is taken on the
disk at once: what cannot be held is refused before training, not in the middle of a step. A process that was forked
from one with such a file makes its own when it first writes: both would write to the same places of one file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from outcore.errors import OutcoreError
from outcore.memory.offload.arena import Arena, ArenaBlock


def allocated_file(size: int, otherwise: str) -> tuple[int, Path]:
    """The descriptor and path of a new file with room for `size` bytes, in the folder for temporary files.

    Raises:
        OutcoreError: the disk has less room; `otherwise` says what else to do.
    """
    folder = Path(os.environ.get("OUTCORE_SCRATCH") or tempfile.gettempdir())
    file, name = tempfile.mkstemp(prefix="outcore-", dir=folder)
    try:
        if size:
            os.posix_fallocate(file, 0, size)  # a mapped page for which there is no room would kill the process
    except OSError as error:
        os.close(file)
        Path(name).unlink()
        raise OutcoreError(
            f"the plan needs {size / 2**20:,.0f} MiB of disk in {folder}: {error.strerror}; set OUTCORE_SCRATCH to a "
            f"folder with more room, or {otherwise}"
        ) from None
    return file, Path(name)


class ScratchFile:
    """Gives out blocks of a file in the folder ``OUTCORE_SCRATCH``, or where temporary files go."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._open()

    def _open(self) -> None:
        self.file, path = allocated_file(self.capacity_bytes, "plan with a larger memory budget")
        path.unlink()
        self.arena, self.process = Arena(self.capacity_bytes), os.getpid()

    def take(self, size: int) -> ArenaBlock:
        """A block of the file; if there is more in flight than planned, the file grows."""
        if self.process != os.getpid():
            self.close()
            self._open()
        slot = self.arena.take(size)
        if slot is None:
            self.arena.grow(size)
            slot = self.arena.take(size)
        assert slot is not None
        return slot

    def give(self, slot: ArenaBlock) -> None:
        """Give a block back."""
        self.arena.give(slot)

    def write(self, flat: torch.Tensor, slot: ArenaBlock) -> None:
        """Write bytes into a block."""
        memory: Any = flat.numpy()
        view, offset = memoryview(memory), slot.offset
        try:
            while view:
                written = os.pwrite(self.file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise OutcoreError(
                f"{flat.numel() / 2**20:,.0f} MiB could not be written to the scratch file: {error.strerror}; set "
                "OUTCORE_SCRATCH to a folder with more room"
            ) from error

    def read(self, flat: torch.Tensor, slot: ArenaBlock) -> torch.Tensor:
        """Fill memory from a block."""
        memory: Any = flat.numpy()
        view, offset = memoryview(memory), slot.offset
        while view:
            count = os.preadv(self.file, [view], offset)
            if not count:
                raise OutcoreError("the scratch file ends too early; is its disk full?")
            view, offset = view[count:], offset + count
        return flat

    def close(self) -> None:
        """Give the disk space back."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            self.close()
