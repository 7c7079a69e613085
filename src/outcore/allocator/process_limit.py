"""How large a limit on a process's memory has to be, so that the allocator finds room at once.

`torch.cuda.set_per_process_memory_fraction` bounds what the caching allocator reserves. When nothing that is free is
large enough for a request, the allocator compares what is reserved *and the whole request* with the limit, although an
expandable segment grows only by what its free end lacks. Where that is too much, all cached memory is given back first.
So a run that never reserves more than the limit may still have to look twice for room:

    reserved ████████████████████████████
                              ░░░░ free at the end of the segment
                              ▒▒▒▒▒▒▒▒ a request: 4 more are mapped, but 8 more are compared with the limit

The allocator's own history of a run tells by how much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_MEDIUM, _MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
_OTHERWISE = (AttributeError, KeyError, RuntimeError, TypeError)
"""What there may be where another version of torch keeps its history in another way."""


def has_limit(device: torch.device) -> bool:
    """Whether the process has limited its own memory on a device."""
    return limit_bytes(device) is not None


def limit_bytes(device: torch.device) -> int | None:
    """What the process may reserve on a device, where it has set a limit."""
    ask: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if device.type != "cuda" or ask is None or not ask(device) < 1:
        return None
    return int(ask(device) * torch.cuda.get_device_properties(device).total_memory)


def limit_for(history: Iterable[Mapping[str, Any]], reserved_bytes: int) -> int:
    """The smallest limit under which a run finds room at once.

    >>> grow, take = {"action": "segment_map", "size": 4 << 20}, {"action": "alloc", "size": 16 << 20}
    >>> limit_for([grow, take], reserved_bytes=28 << 20) >> 20  # 32 MiB are reserved then
    44

    Args:
        history: what the allocator has noted of the run, in order.
        reserved_bytes: what was reserved when it began.
    """
    before = most = reserved_bytes
    for entry in history:
        action, size = entry["action"], int(entry["size"])
        if action in ("segment_map", "segment_alloc"):
            reserved_bytes += size
        elif action in ("segment_unmap", "segment_free"):
            reserved_bytes -= size
            before = reserved_bytes
        elif action == "alloc":
            if reserved_bytes > before:
                most = max(most, before + _requested(size))
            before = reserved_bytes
        most = max(most, reserved_bytes)
    return most


def _requested(size: int) -> int:
    """What the allocator asks a device for, to place so many bytes."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


class LimitTrace:
    """What a limit would have to be for what runs inside of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        """Known afterwards; nothing where somebody else records the allocator's history."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs here."""
        enabled: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        if enabled is None or enabled():
            yield
            return
        reserved = torch.cuda.memory_reserved(self.device)
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=2**20)
        try:
            yield
            with contextlib.suppress(*_OTHERWISE):
                snapshot: Any = torch.cuda.memory._snapshot()
                index = self.device.index if self.device.index is not None else torch.cuda.current_device()
                self.bytes = limit_for(snapshot["device_traces"][index], reserved)
        finally:
            torch.cuda.memory._record_memory_history(None)
