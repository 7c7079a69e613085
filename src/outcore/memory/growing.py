"""What torch's caching allocator takes for tensors that come and go, where its segments grow.

Up to one MiB tensors lie in one segment, larger ones in another; both grow at their end, by two and by twenty MiB at a
time. The smallest free block that is large enough is taken and split, the lowest of several; the block at the end
counts as larger than any other, because it can grow; free neighbours join. Fed with what the real one was asked for, it
takes the same number of bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

__all__ = ["Event", "reserved_by"]

_MIB = 2**20
_UNIT, _SMALL = 512, _MIB
_GROWTH = {True: 2 * _MIB, False: 20 * _MIB}

Event = tuple[int, int]
"""Which tensor, and its bytes; none where it goes."""


class _Block:
    """A piece of a segment."""

    __slots__ = ("after", "before", "free", "offset", "size")

    def __init__(self, offset: int, size: int, before: _Block | None, after: _Block | None) -> None:
        self.offset, self.size, self.before, self.after, self.free = offset, size, before, after, True


class _Segment:
    """A row of blocks."""

    def __init__(self, small: bool) -> None:
        self.small, self.size = small, 0
        self.last: _Block | None = None
        self.spare: list[tuple[int, int, _Block]] = []
        """Free blocks by size and place."""

    def take(self, wanted: int) -> _Block:
        """A block of this size."""
        block = self._best(wanted) or self._grown(wanted)
        self._remove(block)
        block.free = False
        rest = block.size - wanted
        if rest >= _UNIT if self.small else rest > _SMALL:
            other = _Block(block.offset + wanted, rest, block, block.after)
            if block.after is not None:
                block.after.before = other
            else:
                self.last = other
            block.size, block.after = wanted, other
            self._add(other)
        return block

    def give(self, block: _Block) -> None:
        """A block is free again."""
        block.free = True
        if (after := block.after) is not None and after.free:
            self._remove(after)
            block.size, block.after = block.size + after.size, after.after
            self._relink(block)
        if (before := block.before) is not None and before.free:
            self._remove(before)
            before.size, before.after = before.size + block.size, block.after
            self._relink(before)
            block = before
        self._add(block)

    def _best(self, wanted: int) -> _Block | None:
        place = bisect_left(self.spare, (wanted, -1))
        if place < len(self.spare) and self.spare[place][2] is self.last:
            place += 1 if place + 1 < len(self.spare) else 0
        return self.spare[place][2] if place < len(self.spare) else None

    def _grown(self, wanted: int) -> _Block:
        last, step = self.last, _GROWTH[self.small]
        if last is not None and last.free:
            more = -(-(wanted - last.size) // step) * step
            self._remove(last)
            last.size += more
        else:
            more = -(-wanted // step) * step
            self.last = _Block(self.size, more, last, None)
            if last is not None:
                last.after = self.last
            last = self.last
        self.size += more
        self._add(last)
        return last

    def _relink(self, block: _Block) -> None:
        if block.after is not None:
            block.after.before = block
        else:
            self.last = block

    def _add(self, block: _Block) -> None:
        insort(self.spare, (block.size, block.offset, block), key=lambda entry: entry[:2])

    def _remove(self, block: _Block) -> None:
        place = bisect_left(self.spare, (block.size, block.offset), key=lambda entry: entry[:2])
        del self.spare[place]


def reserved_by(events: Iterable[Event], beside: Mapping[int, Iterable[Event]] | None = None) -> int:
    """Bytes of both segments after all events.

    >>> a, b = (1, 30 * 2**20), (2, 12 * 2**20)
    >>> reserved_by([a, b, (1, 0), (3, 16 * 2**20)]) >> 20     # the third lies where the first was
    60

    Args:
        events: tensors as they come and go, those that go with no bytes.
        beside: further ones, by the number of the event they come before.
    """
    segments = {small: _Segment(small) for small in (True, False)}
    living: dict[int, tuple[_Segment, _Block]] = {}
    beside = beside or {}

    def follow(name: int, size: int) -> None:
        if size:
            wanted = -(-size // _UNIT) * _UNIT
            segment = segments[wanted <= _SMALL]
            living[name] = segment, segment.take(wanted)
        else:
            segment, block = living.pop(name)
            segment.give(block)

    for i, event in enumerate(events):
        if i in beside:
            for extra in beside[i]:
                follow(*extra)
        follow(*event)
    return sum(segment.size for segment in segments.values())
