"""One piece of memory, given out in blocks.

First fit over a sorted list of free ranges, joined again when blocks are given back. A block may carry an *event*
(after which what was in it may be overwritten); who takes the memory next gets the events of all blocks it overlaps.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

_ALIGN = 512


@dataclass(frozen=True, slots=True)
class ArenaBlock:
    """A block of the arena."""

    offset: int
    size: int


class Arena:
    """Gives out blocks of a piece of memory.

    >>> arena = Arena(2048)
    >>> first, second = arena.take(600), arena.take(1024)
    >>> second.offset, arena.take(1) is None
    (1024, True)
    >>> arena.give(first); arena.take(1000).offset
    0
    """

    def __init__(self, size: int) -> None:
        self.size = self.rounded(size)
        self._free: list[tuple[int, int]] = [(0, self.size)] if size else []
        self._events: list[tuple[int, int, Any]] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> ArenaBlock | None:
        """A block of at least this size; None if there is no room."""
        size = self.rounded(max(size, 1))
        with self._lock:
            for i, (offset, room) in enumerate(self._free):
                if room >= size:
                    rest = [(offset + size, room - size)] if room > size else []
                    self._free[i : i + 1] = rest
                    return ArenaBlock(offset, size)
        return None

    def give(self, slot: ArenaBlock, event: Any = None) -> None:
        """Give a block back, with the event after which it may be overwritten."""
        with self._lock:
            if event is not None:
                self._events.append((slot.offset, slot.offset + slot.size, event))
            merged: list[tuple[int, int]] = []
            for offset, size in sorted([*self._free, (slot.offset, slot.size)]):
                if merged and merged[-1][0] + merged[-1][1] == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((offset, size))
            self._free = merged

    def events(self, slot: ArenaBlock) -> list[Any]:
        """The events of what was in this block before; they are forgotten."""
        end = slot.offset + slot.size
        with self._lock:
            hit = [m for m in self._events if m[0] < end and slot.offset < m[1]]
            self._events = [m for m in self._events if not (slot.offset <= m[0] and m[1] <= end)]
        return [event for _, _, event in hit]

    def grow(self, size: int) -> None:
        """Add room at the end."""
        size = self.rounded(max(size, 1))
        start, self.size = self.size, self.size + size
        self.give(ArenaBlock(start, size))

    @property
    def free_bytes(self) -> int:
        """Bytes that are not given out."""
        return sum(size for _, size in self._free)

    @staticmethod
    def rounded(size: int) -> int:
        """The bytes that a block of this size takes."""
        return -(-size // _ALIGN) * _ALIGN
