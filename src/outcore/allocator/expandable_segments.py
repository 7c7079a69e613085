"""What torch's caching allocator reserves for tensors that come and go, with expandable segments.

Up to one MiB tensors lie in one segment, larger ones in another; both grow at their end, by two and by twenty MiB at a
time. The smallest free block that is large enough is taken and split, however little is left (in segments of fixed
size, torch leaves up to a MiB with a large tensor), the lowest of several; the block at the end counts as larger than
any other, because it can grow; free neighbours are merged. Fed with what the real one was asked for, it reserves the
same number of bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

__all__ = ["Event", "Segment", "is_small", "reserved_by", "rounded"]

_MIB = 2**20
_UNIT, _SMALL = 512, _MIB
_GROWTH = {True: 2 * _MIB, False: 20 * _MIB}

Event = tuple[int, int]
"""Number of a tensor, and its bytes; 0 where it is freed."""


class Segment:
    """A row of blocks, of which only the free ones are recorded."""

    __slots__ = ("_ends", "_living", "_spare", "_starts", "_step", "size", "top")

    def __init__(self, *, small: bool = False) -> None:
        self.size = self.top = 0
        self._step = _GROWTH[small]
        self._spare: list[tuple[int, int]] = []  # free blocks by size and place
        self._starts: dict[int, int] = {}  # where one begins, and its size
        self._ends: dict[int, int] = {}  # where one ends, and where it begins
        self._living: dict[int, tuple[int, int]] = {}

    def take(self, name: int, wanted: int) -> int:
        """Allocate a tensor; returns where it ends."""
        spare = self._spare
        place = bisect_left(spare, (wanted, -1))
        if place < len(spare):
            size, at = spare[place]
            if at + size == self.size and place + 1 < len(spare):
                size, at = spare[place + 1]
            self._remove(at, size)
        else:
            at, size = self._grown(wanted)
        if size > wanted:
            self._add(at + wanted, size - wanted)
            size = wanted
        self._living[name] = at, size
        end = at + wanted
        if end > self.top:
            self.top = end
        return end

    def give(self, name: int) -> None:
        """Free a tensor."""
        at, size = self._living.pop(name)
        if (after := self._starts.get(at + size)) is not None:
            self._remove(at + size, after)
            size += after
        if (before := self._ends.get(at)) is not None:
            self._remove(before, at - before)
            at, size = before, size + at - before
        self._add(at, size)

    def _grown(self, wanted: int) -> tuple[int, int]:
        at = self._ends.get(self.size, self.size)
        if at < self.size:
            self._remove(at, self.size - at)
        self.size += -(-(wanted - (self.size - at)) // self._step) * self._step
        return at, self.size - at

    def _add(self, at: int, size: int) -> None:
        insort(self._spare, (size, at))
        self._starts[at], self._ends[at + size] = size, at

    def _remove(self, at: int, size: int) -> None:
        del self._spare[bisect_left(self._spare, (size, at))]
        del self._starts[at], self._ends[at + size]


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


def rounded(size: int) -> int:
    """Bytes that a tensor takes."""
    return -(-size // _UNIT) * _UNIT


def is_small(size: int) -> bool:
    """Whether a tensor lies with the small ones."""
    return rounded(size) <= _SMALL
