"""Blocks of an arena never overlap, join again when they are free, and tell what was in them before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import OutcoreError
from outcore.memory.offload import host_limit
from outcore.memory.offload.arena import Arena, ArenaBlock
from outcore.memory.offload.scratch_file import ScratchFile
from outcore.planner.memory.copy_schedule import HOST_SHARE

UNIT = 512


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4 * UNIT)), max_size=40))
def test_blocks_are_where_a_map_of_all_bytes_has_room(moves: list[tuple[bool, int]]) -> None:
    """Against a map of the units: first fit, no overlap, all of it there again in the end."""
    arena, taken, used = Arena(8 * UNIT), list[ArenaBlock](), [False] * 8
    for take, size in moves:
        if take:
            units = max(1, -(-size // UNIT))
            starts = [i for i in range(9 - units) if not any(used[i : i + units])]
            block = arena.take(size)
            assert (block is None) == (not starts)
            if block is not None:
                assert (block.offset, block.size) == (starts[0] * UNIT, units * UNIT)
                used[starts[0] : starts[0] + units] = [True] * units
                taken.append(block)
        elif taken:
            block = taken.pop(size % len(taken))
            arena.give(block)
            first = block.offset // UNIT
            used[first : first + block.size // UNIT] = [False] * (block.size // UNIT)
        assert arena.free_bytes == UNIT * used.count(False)
    for block in taken:
        arena.give(block)
    assert arena.take(8 * UNIT) == ArenaBlock(0, 8 * UNIT)


def test_who_takes_memory_next_gets_the_events_of_all_that_was_in_it() -> None:
    arena = Arena(4 * UNIT)
    first, second = arena.take(UNIT), arena.take(2 * UNIT)
    assert first is not None and second is not None
    arena.give(first, "a")
    arena.give(second, "b")
    both = ArenaBlock(0, 2 * UNIT)
    assert arena.events(ArenaBlock(3 * UNIT, UNIT)) == []
    assert arena.events(both) == ["a", "b"]
    assert arena.events(both) == ["b"], "of b a part is still there for who takes it; a is over"
    assert arena.events(ArenaBlock(UNIT, 2 * UNIT)) == ["b"]
    assert arena.events(ArenaBlock(0, 4 * UNIT)) == []


def test_an_arena_grows_at_its_end() -> None:
    arena = Arena(0)
    assert arena.take(1) is None and arena.free_bytes == 0
    arena.grow(UNIT + 1)
    assert arena.size == arena.free_bytes == 2 * UNIT
    assert arena.take(2 * UNIT) == ArenaBlock(0, 2 * UNIT)
    arena.grow(0)
    assert arena.take(UNIT) == ArenaBlock(2 * UNIT, UNIT)


def test_a_file_gives_back_what_was_written_and_grows_beyond_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTCORE_SCRATCH", str(tmp_path))
    scratch = ScratchFile(2 * UNIT)
    assert list(tmp_path.iterdir()) == [], "it has no name that could be left behind"
    assert os.fstat(scratch.file).st_size == 2 * UNIT and os.fstat(scratch.file).st_blocks * 512 >= 2 * UNIT
    parts = [torch.randint(256, (size,), dtype=torch.uint8) for size in (700, 3 * UNIT, 1)]
    blocks = [scratch.take(part.numel()) for part in parts]
    for part, block in zip(parts, blocks, strict=True):
        scratch.write(part, block)
    for part, block in zip(parts, blocks, strict=True):
        assert torch.equal(scratch.read(torch.empty_like(part), block), part)
    scratch.give(blocks[0])
    assert scratch.take(2 * UNIT).offset == blocks[0].offset
    number = scratch.file
    scratch.close()
    scratch.close()
    with pytest.raises(OSError):
        os.fstat(number)


def test_a_file_that_ends_too_early_is_refused() -> None:
    scratch = ScratchFile(0)
    with pytest.raises(OutcoreError, match="the scratch file ends too early"):
        scratch.read(torch.empty(8, dtype=torch.uint8), scratch.take(8))
    scratch.close()


def test_the_folder_of_a_file_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_SCRATCH", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        ScratchFile(0)
    monkeypatch.setenv("OUTCORE_SCRATCH", str(tmp_path))
    ScratchFile(0).close()


def test_room_is_what_is_free_less_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTCORE_HOST_MEMORY", raising=False)
    monkeypatch.setattr(host_limit, "host_free_bytes", lambda: 6000)
    assert host_limit.host_limit_bytes() == int(HOST_SHARE * 6000)
    monkeypatch.setenv("OUTCORE_HOST_MEMORY", "2KiB")
    assert host_limit.host_limit_bytes() == 2048
