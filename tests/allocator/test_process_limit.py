"""What a limit has to be: an allocator with a limit, simulated, looks twice for room below it and not above."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outcore.allocator.process_limit import limit_for

MIB = 2**20


def rounded(size: int) -> int:
    """What is asked for, for a request."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


class Segment:
    """One expandable segment: blocks from the front, grown at its end, under a limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.mapped, self.most, self.retries = limit, 0, 0, 0
        self.blocks: dict[int, tuple[int, int]] = {}
        self.history: list[dict[str, Any]] = []

    def holes(self) -> list[tuple[int, int]]:
        ends, at = [], 0
        for begin, size in sorted(self.blocks.values()):
            ends.append((at, begin))
            at = begin + size
        return [*ends, (at, self.mapped)]

    def alloc(self, name: int, size: int) -> None:
        for begin, end in self.holes():
            if end - begin >= size:
                break
        else:
            begin, end = self.holes()[-1]
            if self.limit is not None and self.mapped + rounded(size) > self.limit:
                self.retries += 1
                self.history.append({"action": "segment_unmap", "size": end - begin})
                self.mapped = begin
            grown = -(-(begin + size - self.mapped) // (20 * MIB)) * 20 * MIB
            self.mapped += grown
            self.most = max(self.most, self.mapped)
            self.history.append({"action": "segment_map", "size": grown})
        self.blocks[name] = begin, size
        self.history.append({"action": "alloc", "size": size})

    def free(self, name: int) -> None:
        _, size = self.blocks.pop(name)
        self.history.append({"action": "free_completed", "size": size})


def run(seed: int, limit: int | None) -> Segment:
    segment, pick, names = Segment(limit), random.Random(seed), []
    for name in range(60):
        if names and pick.random() < 0.45:
            segment.free(names.pop(pick.randrange(len(names))))
        else:
            segment.alloc(name, pick.choice((30, 50, 80, 130)) * MIB)
            names.append(name)
    return segment


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_of_that_size_does_and_a_smaller_one_does_not(seed: int) -> None:
    free = run(seed, None)
    limit = limit_for(free.history, 0)
    assert limit >= free.most
    assert run(seed, limit).retries == 0
    assert limit == free.most or run(seed, limit - 1).retries > 0


def test_limits_are_larger_than_what_is_reserved() -> None:
    larger = [limit_for((free := run(seed, None)).history, 0) > free.most for seed in range(20)]
    assert sum(larger) > 3


def test_what_was_reserved_before_counts() -> None:
    history = run(3, None).history
    assert limit_for(history, 7 * MIB) == limit_for(history, 0) + 7 * MIB


def test_memory_that_was_given_back_makes_room_for_later_requests() -> None:
    def noted(*entries: tuple[str, int]) -> list[dict[str, Any]]:
        return [{"action": action, "size": size * MIB} for action, size in entries]

    first = [("segment_map", 40), ("alloc", 40)]
    again = [("segment_unmap", 40), ("segment_map", 30), ("alloc", 30)]
    assert limit_for(noted(*first, *again), 0) == 40 * MIB
    assert limit_for(noted(*first, *again[1:]), 0) == 70 * MIB
