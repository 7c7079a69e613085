"""Memory of the host that a step has freed stays with the process for the next step, as on a GPU.

glibc gives memory back to the system when enough of it is free at the end of its heap, and takes a large block from the
system each time it is asked for one. A training step frees all it held and asks for the same again, so every step pays
for new pages: each has to be found, cleared and mapped when it is first written, which takes a few microseconds, in a
virtual machine more. A copy into 45 MiB of new memory took seven times as long as one into memory that was used before,
and whether a step got new pages depended on what happened to lie at the end of the heap.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_FROM_HEAP_BYTES = 32 << 20
"""The largest block that glibc lets come from its heap."""
_KEEP_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Keep what is freed, for this process from now on; returns whether the system's allocator can."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _FROM_HEAP_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEEP_BYTES))
