"""How much memory of a device is free at the moment.

Of a host that is what programs can have without swapping, so pages of files that the system only caches count as free;
and in a container no more than its limit leaves, however much the host has.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from outcore.machine.probe_cpu import cpu_memory_bytes

_SYSTEM = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Free memory of a device: of a GPU what the driver and PyTorch's cache hold free, else the host's."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return host_free_bytes()


def host_free_bytes() -> int:
    """What the system and the container leave free of the host's memory; all of it where neither says."""
    free = cpu_memory_bytes()
    with contextlib.suppress(OSError):
        lines = _SYSTEM.read_text(encoding="utf-8").splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), free)
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_CONTAINER / n).read_text(encoding="utf-8")) for n in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return max(0, free)
