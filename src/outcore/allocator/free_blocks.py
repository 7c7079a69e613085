"""The rules that torch's caching allocator has in every mode: sizes, and the free blocks of one address space.

Sizes are rounded up to 512 bytes; up to one MiB counts as small, and small tensors lie apart from large ones. Of the
free blocks the smallest that is large enough is taken, the lowest of several; free neighbours join.
"""

from __future__ import annotations

from bisect import bisect_left, insort

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
