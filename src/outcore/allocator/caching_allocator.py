"""What torch's caching allocator reserves on a GPU to hold tensors that come and go.

Some rules it has in every mode (`FreeBlocks`): sizes are rounded up to 512 bytes; up to one MiB counts as small,
and small tensors lie apart from large ones. Of the free blocks the smallest that is large enough is taken, the lowest
of several, and split; free neighbours join.

*Segments of fixed size.* Up to one MiB, memory comes from segments of two MiB; up to ten, from segments of twenty;
beyond, a segment each. A graph that runs on a stream of its own has memory of its own, which is never given back; so an
array of streams costs not the bytes of its tensors at their peak but the segments that the allocator once took for
them. Feeding the simulator the tensors of a replay on fake tensors, in order, gives what the real one will take, gaps
included.

*Expandable segments.* Small tensors lie in one segment, larger ones in another; both grow at their end, by two and by
twenty MiB at a time. Blocks are split however little is left (in segments that do not grow, torch leaves up to a MiB
with a large tensor); the block at the end counts as larger than any other, because it can grow. Fed with what the real
one was asked for, it takes the same number of bytes.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.graph.aliasing import storage_key

MIB = 2**20
UNIT, SMALL = 512, MIB


def rounded(size: int) -> int:
    """Bytes that a tensor takes."""
    return -(-size // UNIT) * UNIT


def is_small(size: int) -> bool:
    """Whether a tensor lies with the small ones."""
    return rounded(size) <= SMALL


class FreeBlocks:
    """The free blocks among those of an address space; those in use are not written down."""

    __slots__ = ("ends", "spare", "starts")

    def __init__(self) -> None:
        self.spare: list[tuple[int, int]] = []
        """By size and place."""
        self.starts: dict[int, int] = {}
        """Where one begins, and its size."""
        self.ends: dict[int, int] = {}
        """Where one ends, and where it begins."""

    def add(self, at: int, size: int) -> None:
        """A block that no neighbour joins."""
        insort(self.spare, (size, at))
        self.starts[at], self.ends[at + size] = size, at

    def remove(self, at: int, size: int) -> None:
        """A block that is taken, or joined by another."""
        del self.spare[bisect_left(self.spare, (size, at))]
        del self.starts[at], self.ends[at + size]

    def give_back(self, at: int, size: int) -> None:
        """A block that was in use; it joins free neighbours."""
        if (after := self.starts.get(at + size)) is not None:
            self.remove(at + size, after)
            size += after
        if (before := self.ends.get(at)) is not None:
            self.remove(before, at - before)
            at, size = before, size + at - before
        self.add(at, size)


_MIDDLE, _APART = 10 * MIB, UNIT
"""Below which a large tensor shares a segment; between the places of segments, which never join."""

Block = tuple[bool, int, int]
"""Whether it is among the small ones, its place and its size."""


class CachingAllocator:
    """Segments and their blocks, of one pool."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes of all segments."""
        self._free = {True: FreeBlocks(), False: FreeBlocks()}
        self._next = 0
        """Place of the next segment."""

    def take(self, size: int) -> Block:
        """Allocate a tensor of so many bytes: the smallest free block that is large enough, else a new segment."""
        wanted, small = max(UNIT, rounded(size)), is_small(size)
        free = self._free[small]
        place = bisect_left(free.spare, (wanted, -1))
        if place < len(free.spare):
            size, at = free.spare[place]
            free.remove(at, size)
        else:
            size = 2 * MIB if small else 20 * MIB if wanted < _MIDDLE else -(-wanted // (2 * MIB)) * 2 * MIB
            at = self._next
            self.reserved += size
            self._next += size + _APART
        left = size - wanted
        if left >= UNIT if small else left > SMALL:
            free.add(at + wanted, left)
            size = wanted
        return small, at, size

    def give_back(self, block: Block) -> None:
        """A tensor is gone; its memory joins that of free neighbours."""
        small, at, size = block
        self._free[small].give_back(at, size)


class ReservedBytes(LiveBytes):
    """Counts allocated bytes, and what an allocator would have reserved for them."""

    def __init__(self, known: Any = ()) -> None:
        self.allocator = CachingAllocator()
        super().__init__(known)

    def _note(self, tensor: torch.Tensor, operation: str, source: int | None, *, counted: bool = True) -> None:
        key = storage_key(tensor)
        new = key is not None and key not in self._alive
        super()._note(tensor, operation, source, counted=counted)
        if new and counted:
            storage = tensor.untyped_storage()
            block = self.allocator.take(storage.nbytes())
            weakref.finalize(storage, self.allocator.give_back, block)


_GROWTH = {True: 2 * MIB, False: 20 * MIB}

Event = tuple[int, int]
"""Number of a tensor, and its bytes; 0 where it is freed."""


class ExpandableSegment(FreeBlocks):
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
    segments = {small: ExpandableSegment(small=small) for small in (True, False)}
    living: dict[int, ExpandableSegment] = {}
    beside = beside or {}
    for i, event in enumerate(events):
        for name, size in (*beside.get(i, ()), event):
            if size:
                living[name] = segments[is_small(size)]
                living[name].take(name, rounded(size))
            else:
                living.pop(name).give(name)
    return sum(segment.size for segment in segments.values())
