"""TensorFlow's allocator, simulated: best fit with coalescing.

The allocator takes regions from the system, each at least twice the last, and cuts chunks from them. A request takes
the smallest free chunk that is large enough, and takes *all* of it unless it is at least twice as large; so a tensor of
2.25 MiB may hold 4. That is what `tf.config.experimental.get_memory_info` counts, and what a budget has to have room
for. It depends on what was freed before, so requests and frees are replayed in the order of a step. On a CPU, requests
under 256 KiB go to the system and count as they are.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["BestFitAllocator"]

_SMALL = 256 * 1024
_MOST_WASTE = 128 * 2**20
_FIRST_REGION = 2 * 2**20


@dataclass(eq=False)
class _Chunk:
    size: int
    start: int
    free: bool = True
    before: _Chunk | None = None
    after: _Chunk | None = None


class BestFitAllocator:
    """Chunks in use and their peak."""

    def __init__(self) -> None:
        self.in_use = self.peak = 0
        self._region = _FIRST_REGION
        self._reserved = 0
        self._free: list[tuple[int, int, _Chunk]] = []

    def take(self, size: int) -> _Chunk | int | None:
        """Memory for a tensor; give it back with `give`."""
        if size <= 0:
            return None
        if size < _SMALL:
            self._count(size)
            return size
        rounded = -(-size // 256) * 256
        place = bisect.bisect_left(self._free, rounded, key=lambda entry: entry[0])
        if place == len(self._free):
            self._extend(rounded)
            place = bisect.bisect_left(self._free, rounded, key=lambda entry: entry[0])
        chunk = self._free.pop(place)[2]
        if chunk.size >= 2 * rounded or chunk.size - rounded >= _MOST_WASTE:
            rest = _Chunk(chunk.size - rounded, chunk.start + rounded, True, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.size, chunk.after = rounded, rest
            self._insert(rest)
        chunk.free = False
        self._count(chunk.size)
        return chunk

    def give(self, held: _Chunk | int | None) -> None:
        """Free what `take` gave."""
        if held is None:
            return
        if isinstance(held, int):
            self.in_use -= held
            return
        self.in_use -= held.size
        held.free = True
        if held.after is not None and held.after.free:
            self._remove(held.after)
            held = self._join(held, held.after)
        if held.before is not None and held.before.free:
            self._remove(held.before)
            held = self._join(held.before, held)
        self._insert(held)

    def _count(self, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

    def _join(self, first: _Chunk, second: _Chunk) -> _Chunk:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _extend(self, rounded: int) -> None:
        grown = rounded > self._region
        while rounded > self._region:
            self._region *= 2
        self._insert(_Chunk(self._region, self._reserved))
        self._reserved += self._region
        if not grown:
            self._region *= 2

    def _insert(self, chunk: _Chunk) -> None:
        bisect.insort(self._free, (chunk.size, chunk.start, chunk), key=lambda entry: entry[:2])

    def _remove(self, chunk: _Chunk) -> None:
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.start), key=lambda entry: entry[:2])]
