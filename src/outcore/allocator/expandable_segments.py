"""What torch's caching allocator reserves for tensors that come and go, with expandable segments.

Up to one MiB tensors lie in one segment, larger ones in another; both grow at their end, by two and by twenty MiB at a
time. Blocks are taken as everywhere (`outcore.allocator.free_blocks`), and split however little is left (in segments
that do not grow, torch leaves up to a MiB with a large tensor); the block at the end counts as larger than any other,
because it can grow. Fed with what the real one was asked for, it takes the same number of bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from outcore.allocator.free_blocks import MIB, FreeBlocks, is_small, rounded

_GROWTH = {True: 2 * MIB, False: 20 * MIB}

Event = tuple[int, int]
"""Number of a tensor, and its bytes; 0 where it is freed."""


class Segment(FreeBlocks):
    """A row of blocks that grows at its end."""

    __slots__ = ("_living", "_step", "size", "top")

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        self.size = self.top = 0
        self._step = _GROWTH[small]
        self._living: dict[int, tuple[int, int]] = {}

    def take(self, name: int, wanted: int) -> int:
        """A tensor comes; where it ends."""
        spare = self.spare
        place = bisect_left(spare, (wanted, -1))
        if place < len(spare):
            size, at = spare[place]
            if at + size == self.size and place + 1 < len(spare):
                size, at = spare[place + 1]
            self.remove(at, size)
        else:
            at, size = self._grown(wanted)
        if size > wanted:
            self.add(at + wanted, size - wanted)
            size = wanted
        self._living[name] = at, size
        end = at + wanted
        if end > self.top:
            self.top = end
        return end

    def give(self, name: int) -> None:
        """Free the memory of a tensor, by the number under which it was taken."""
        self.give_back(*self._living.pop(name))

    def _grown(self, wanted: int) -> tuple[int, int]:
        at = self.ends.get(self.size, self.size)
        if at < self.size:
            self.remove(at, self.size - at)
        self.size += -(-(wanted - (self.size - at)) // self._step) * self._step
        return at, self.size - at


def reserved_by(events: Iterable[Event], beside: Mapping[int, Iterable[Event]] | None = None) -> int:
    """Bytes of both segments after all events.

    >>> a, b = (1, 30 * 2**20), (2, 12 * 2**20)
    >>> reserved_by([a, b, (1, 0), (3, 16 * 2**20)]) >> 20     # the third lies where the first was
    60

    Args:
        events: tensors as they come and go, those that go with no bytes.
        beside: further ones, by the number of the event they come before.
    """
    segments = {small: Segment(small=small) for small in (True, False)}
    living: dict[int, Segment] = {}
    beside = beside or {}
    for i, event in enumerate(events):
        for name, size in (*beside.get(i, ()), event):
            if size:
                living[name] = segments[is_small(size)]
                living[name].take(name, rounded(size))
            else:
                living.pop(name).give(name)
    return sum(segment.size for segment in segments.values())
