"""What torch's caching allocator reserves on a GPU to hold tensors that come and go.

A graph that runs on a stream of its own has a pool of its own, which is never given back; so an array of streams costs
not the bytes of its tensors at their peak but the segments that the allocator once reserved for them. Its rules are
few: up to one MiB, memory comes from segments of two MiB; up to ten, from segments of twenty; beyond, a segment each.
The smallest free block that is large enough is taken and split; free neighbours are merged. Fed with the tensors of a
replay on fake tensors, in order, the simulation gives what the real one will reserve, gaps included.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch

from outcore.cost.measured.live_bytes import LiveBytes, storage_key

__all__ = ["CachingAllocator", "ReservedBytes"]

_MIB = 2**20
_UNIT, _SMALL, _MIDDLE = 512, _MIB, 10 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Segments and their blocks, of one pool."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes of all segments."""
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        """Free blocks of small and large segments, by size and age."""
        self._count = 0

    def take(self, size: int) -> _Block:
        """Allocate memory for a tensor; returns its block."""
        wanted = max(1, -(-size // _UNIT)) * _UNIT
        small = wanted <= _SMALL
        free = self._free[small]
        place = bisect_left(free, wanted, key=lambda entry: entry[0])
        if place < len(free):
            block = free.pop(place)[2]
        else:
            segment = 2 * _MIB if small else 20 * _MIB if wanted < _MIDDLE else -(-wanted // (2 * _MIB)) * 2 * _MIB
            self.reserved += segment
            block = _Block(segment, small)
        block.free = False
        left = block.size - wanted
        if left >= _UNIT if small else left > _SMALL:
            rest = _Block(left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = wanted, rest
            self._put(rest)
        return block

    def give_back(self, block: _Block) -> None:
        """Free the block of a tensor; it is merged with free neighbours."""
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._free[block.small] = [entry for entry in self._free[block.small] if entry[2] is not other]
            block.size += other.size
            if other is block.before:
                block.before = other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        self._put(block)

    def _put(self, block: _Block) -> None:
        block.free = True
        self._count += 1
        insort(self._free[block.small], (block.size, self._count, block), key=lambda entry: entry[:2])


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
