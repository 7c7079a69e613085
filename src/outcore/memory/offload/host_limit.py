"""How much of the host's memory tensors may take.

What the system and the container leave free, less a fifth for other programs; or what ``OUTCORE_HOST_MEMORY`` says, on
a host that is shared. What has no room is written on to the disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from outcore.machine.units import parse_bytes
from outcore.planner.memory.copy_schedule import HOST_SHARE


def host_limit_bytes() -> int:
    """The number of bytes of host memory that tensors may take."""
    if given := os.environ.get("OUTCORE_HOST_MEMORY"):
        return parse_bytes(given)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), free)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return max(0, int(HOST_SHARE * free))
