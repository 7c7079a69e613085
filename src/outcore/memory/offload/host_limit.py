"""How much of the host's memory tensors may take.

What the system and the container leave free, less a fifth for other programs; or what ``OUTCORE_HOST_MEMORY`` says, on
a host that is shared. What has no room is written on to the disk.
"""

from __future__ import annotations

import os

from outcore.machine.free_memory import host_free_bytes
from outcore.machine.units import parse_bytes
from outcore.planner.memory.copy_schedule import HOST_SHARE


def host_limit_bytes() -> int:
    """The number of bytes of host memory that tensors may take."""
    if given := os.environ.get("OUTCORE_HOST_MEMORY"):
        return parse_bytes(given)
    return int(HOST_SHARE * host_free_bytes())
