"""Off-device storage: dense memory that holds what is offloaded.

It is pinned host memory for a GPU, and a file mapped into memory for a CPU. Either is ordinary memory to whoever reads
or writes it, so a tensor that is offloaded is simply a tensor in that memory.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

import torch

from outcore.errors import OutcoreError
from outcore.memory.offload.pinning import pin, unpin
from outcore.memory.offload.scratch_file import allocated_file


class OffDeviceStorage(Protocol):
    """Dense memory off the device."""

    memory: torch.Tensor

    def close(self) -> None:
        """Give it back when nothing refers to it any more."""


def off_device_storage(device: torch.device, size: int) -> OffDeviceStorage:
    """Storage of `size` bytes for what is offloaded from a device."""
    return PinnedStorage(size) if device.type == "cuda" else FileStorage(size)


class PinnedStorage:
    """Host memory, pinned as it is (torch's own pinned allocator rounds up to powers of two)."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.pinned = 0
        if refused := pin(self.memory.data_ptr(), size):
            raise OutcoreError(
                f"{size / 2**30:.2f} GiB of host memory could not be pinned ({refused}); offload less of the state"
            )
        self.pinned = self.memory.data_ptr()

    def close(self) -> None:
        """Unpin it."""
        if self.pinned and not sys.is_finalizing():
            unpin(self.pinned)
            self.pinned = 0

    def __del__(self) -> None:
        if getattr(self, "pinned", 0):
            self.close()


class FileStorage:
    """A file without a name, mapped into memory: it is gone when the last tensor in it is."""

    def __init__(self, size: int) -> None:
        file, path = allocated_file(size, "offload less of the state")
        try:
            self.memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(file)
            path.unlink()

    def close(self) -> None:
        """Nothing to do: the mapping ends with the memory."""
