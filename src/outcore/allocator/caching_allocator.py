"""What torch's caching allocator reserves on a GPU to hold tensors that come and go.

A graph that runs on a stream of its own has memory of its own, which is never given back; so an array of streams costs
not the bytes of its tensors at their peak but the segments that the allocator once took for them. Its rules are few:
up to one MiB, memory comes from segments of two MiB; up to ten, from segments of twenty; beyond, a segment each. The
smallest free block that is large enough is taken and split (`outcore.allocator.free_blocks`). Feeding it the tensors of
a replay on fake tensors, in order, gives what the real one will take, gaps included.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from typing import Any

import torch

from outcore.allocator.free_blocks import MIB, SMALL, UNIT, FreeBlocks, is_small, rounded
from outcore.cost.measured.live_bytes import LiveBytes, storage_key

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
