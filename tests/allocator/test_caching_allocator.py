"""What the allocator takes, by its own rules."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from outcore.allocator.caching_allocator import CachingAllocator, ReservedBytes
from outcore.memory.cuda_graphs import pool as graph_pool

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2), ([MIB], 2), ([MIB, MIB], 2), ([MIB, MIB, 1], 4), ([MIB + 1], 20), ([2 * MIB] * 10, 20),
        ([2 * MIB] * 11, 40), ([10 * MIB], 10), ([11 * MIB], 12), ([11 * MIB, 11 * MIB, 1], 26),
    ],
)  # fmt: skip
def test_segments_come_in_three_sizes(sizes: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.take(size)
    assert allocator.reserved == reserved * MIB


def test_what_was_given_back_is_used_again_and_neighbours_join() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2]):
        allocator.give_back(block)
    allocator.take(10 * MIB)  # two holes of five do not make one of ten
    assert allocator.reserved == 30 * MIB
    allocator.give_back(blocks[1])  # now they do
    allocator.take(15 * MIB)
    assert allocator.reserved == 30 * MIB
    allocator.take(5 * MIB)
    assert allocator.reserved == 50 * MIB


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB), allocator.take(12 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    allocator.take(11 * MIB)
    allocator.take(40 * MIB)
    assert allocator.reserved == 52 * MIB


def test_tensors_are_counted_where_they_live_and_die() -> None:
    with ReservedBytes() as seen:
        for _ in range(3):
            made = torch.zeros(3 * MIB)  # twelve MiB
            kept = made + 1
            del made
        del kept
    assert seen.allocator.reserved == 36 * MIB and seen.live == 0 and seen.peak == 36 * MIB


@pytest.fixture
def segments_of_fixed_sizes() -> Iterator[None]:
    """Without the expandable segments that a plan has turned on for the rest of the process."""
    graph_pool._expandable_segments(on=False)
    yield
    graph_pool._expandable_segments(on=graph_pool._stays)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(4))
def test_it_takes_what_torch_takes(seed: int, segments_of_fixed_sizes: None) -> None:
    pool = torch.cuda.MemPool()  # what ran before has left nothing in it
    before = torch.cuda.memory_reserved()
    draw, allocator = random.Random(seed), CachingAllocator()
    held: list[tuple[torch.Tensor, object]] = []
    with torch.cuda.use_mem_pool(pool):
        for _ in range(300):
            if held and draw.random() < 0.45:
                tensor, block = held.pop(draw.randrange(len(held)))
                allocator.give_back(block)  # type: ignore[arg-type]
                del tensor
            else:
                size = int(2 ** draw.uniform(8, 26))
                held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), allocator.take(size)))
            assert torch.cuda.memory_reserved() - before == allocator.reserved
