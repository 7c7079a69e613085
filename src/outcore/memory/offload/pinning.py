"""Pinning host memory as it lies, for copies that run beside the computing.

torch's own pinned allocator rounds up to powers of two, so memory is registered instead. Where that is refused (a limit
on locked memory, too little of it), CUDA remembers the error and reports it for the next, innocent call; so it is
collected here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def pin(address: int, size: int) -> str:
    """Pin so many bytes at an address; returns why that could not be done, or nothing."""
    status: Any = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    if int(status) == 0:
        return ""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(status)


def unpin(address: int) -> None:
    """Unpin what begins at an address, after the copies that are under way."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
