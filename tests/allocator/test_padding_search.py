"""What the allocator would take, against a slow reading of its rules; and padding blocks that make it take less."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from outcore.allocator.caching_allocator import Event, reserved_by
from outcore.allocator.padding_search import (
    PaddingBlock,
    PaddingSearch,
    _beside,
    _large,
    _living,
    _ordered,
    _Search,
    best_padding_blocks,
)
from outcore.graph.record.recording import Tape

MIB = 2**20


def slowly(events: list[Event]) -> int:
    """The same rules, block by block from the beginning of each segment."""
    rows: dict[bool, list[list[Any]]] = {True: [], False: []}  # name or none, size
    for name, size in events:
        if not size:
            row = next(row for row in rows.values() if any(b[0] == name for b in row))
            for block in row:
                block[0] = None if block[0] == name else block[0]
            joined: list[list[Any]] = []
            for block in row:
                if joined and joined[-1][0] is None and block[0] is None:
                    joined[-1][1] += block[1]
                else:
                    joined.append(block)
            row[:] = joined
            continue
        wanted = -(-size // 512) * 512
        small = wanted <= MIB
        row = rows[small]
        fitting = [i for i, b in enumerate(row) if b[0] is None and b[1] >= wanted]
        inner = [i for i in fitting if i != len(row) - 1]
        if not fitting:
            if not row or row[-1][0] is not None:
                row.append([None, 0])
            step = 2 * MIB if small else 20 * MIB
            row[-1][1] += -(-(wanted - row[-1][1]) // step) * step
        at = min(inner, key=lambda i: (row[i][1], i)) if inner else len(row) - 1
        rest = row[at][1] - wanted
        if rest:
            row[at : at + 1] = [[name, wanted], [None, rest]]
        else:
            row[at][0] = name
    return sum(b[1] for row in rows.values() for b in row)


def some_events(seed: int, count: int = 120) -> list[Event]:
    draw, living, events = random.Random(seed), list[int](), list[Event]()
    for name in range(count):
        events.append((name, draw.choice([700, 5000, MIB, MIB + 1, 3 * MIB, 7 * MIB, 11 * MIB, 26 * MIB])))
        living.append(name)
        while living and draw.random() < 0.48:
            events.append((living.pop(draw.randrange(len(living))), 0))
    return events


@pytest.mark.parametrize("seed", range(12))
def test_the_quick_count_is_the_slow_one(seed: int) -> None:
    events = some_events(seed)
    assert reserved_by(events) == slowly(events) >= _living(events)


def test_the_tail_grows_before_a_new_block_is_made() -> None:
    assert reserved_by([(1, 25 * MIB)]) == 40 * MIB
    assert reserved_by([(1, 25 * MIB), (2, 30 * MIB)]) == 60 * MIB  # fifteen were left, twenty more are enough


def test_what_is_left_of_a_block_is_used_however_little_it_is() -> None:
    """A tensor that is smaller by less than a MiB leaves that to what is free beside it."""
    there: list[Event] = [(1, 40 * MIB), (2, 9 * MIB), (3, 11 * MIB), (1, 0), (4, 40 * MIB - 512 * 1024), (2, 0)]
    assert reserved_by(there) == 60 * MIB
    assert reserved_by([*there, (5, 9 * MIB + 512 * 1024)]) == slowly([*there, (5, 9 * MIB + 512 * 1024)]) == 60 * MIB


@pytest.mark.parametrize("seed", range(4))
def test_padding_blocks_take_what_they_are_said_to_and_never_more(seed: int) -> None:
    events = some_events(seed, 200)
    steps = [*range(0, len(events) // 2, 5), len(events) // 2]
    padding_blocks, least = best_padding_blocks(events, steps, time_limit_s=0.5)
    beside = _beside(padding_blocks, steps)
    whole = [e for i, event in enumerate(events) for e in (*beside.get(i, ()), event)]
    assert least == slowly(whole) <= slowly(events)
    assert not padding_blocks or least < slowly(events)


def test_a_hole_is_closed() -> None:
    """What forward works with leaves a hole just too small for what backward needs."""
    forward: list[Event] = [(1, 24 * MIB), (2, 60 * MIB), (1, 0)]
    backward: list[Event] = [(3, 30 * MIB), (2, 0)]
    events, steps = [*forward, *backward], [0, 1, 2, 3]
    padding_blocks, least = best_padding_blocks(events, steps, time_limit_s=1.0)
    assert padding_blocks and least < reserved_by(events)


@pytest.mark.parametrize("seed", range(4))
def test_padding_blocks_are_judged_by_how_far_the_segment_is_used(seed: int) -> None:
    """Twenty MiB at a time, that is what the allocator takes for large tensors; also where backward brings none."""
    events = [(name, size) for name, size in some_events(seed, 200) if not size or size > MIB]
    there = {name for name, size in events if size}
    events = [event for event in events if event[0] in there]
    steps = [*range(0, len(events), 5), len(events)]
    search = _Search(*_large(events, steps))
    for _ in range(20):
        padding_blocks = search.changed([])
        beside = _beside(padding_blocks, steps)
        whole = [e for i in range(len(events) + 1) for e in (*beside.get(i, ()), *events[i : i + 1])]
        assert slowly(whole) == -(-search.top(padding_blocks) // (20 * MIB)) * 20 * MIB


@pytest.mark.parametrize("seed", range(4))
def test_how_much_of_a_step_fits(seed: int) -> None:
    events = [(name, size) for name, size in some_events(seed, 200) if not size or size > MIB]
    there = {name for name, size in events if size}
    search = _Search(*_large([event for event in events if event[0] in there], [0, 1]))
    for part in (0.3, 0.6, 0.9, 1.0):
        most = int(part * search.least)
        fits, _ = search.reach([], most)
        tops = [_Search(search.events[:count], [0, 1]).least for count in range(len(search.events) + 1)]
        assert fits == next((i - 1 for i, top in enumerate(tops) if top > most), len(search.events) + 1)


def test_a_hole_is_closed_by_what_lets_more_of_the_step_fit() -> None:
    """Twice forward leaves a hole that is too small; each needs a padding block of its own."""
    events: list[Event] = []
    for i in (0, 10):
        events += [(i + 1, 24 * MIB), (i + 2, 60 * MIB), (i + 1, 0), (i + 3, 30 * MIB)]
    search = _Search(*_large(events, range(len(events) + 1)))
    before, _ = search.least, search.by_reach(time.thread_time() + 1.0)
    assert search.top(search.found) == search.least <= before - 20 * MIB
    assert search.least >= search.floor


def test_what_goes_before_a_step_goes_first() -> None:
    padding_blocks = [PaddingBlock(5, 1, 2), PaddingBlock(7, 2)]
    assert _beside(padding_blocks, [0, 4, 9, 12]) == {4: [(-1, 5)], 9: [(-1, 0), (-2, 7)], 12: [(-2, 0)]}


def test_padding_blocks_of_one_step_come_as_they_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, also where two are alike: the allocator puts the first one where the second would lie."""
    padding_blocks = [PaddingBlock(64, 0), PaddingBlock(32, 0), PaddingBlock(32, 0)]
    asked: list[int] = []

    def empty(size: int, **_: Any) -> torch.Tensor:
        asked.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    padding = PaddingSearch(torch.device("cpu"), padding_blocks)
    padding.reached(0)
    tried = [size for _, size in _beside(padding_blocks, [0, 4])[0]]
    assert asked == tried == [64, 32, 32] and len(padding.held) == 3


def test_a_trace_is_put_in_order() -> None:
    def entry(action: str, addr: int, size: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size}

    trace = [entry("alloc", 100, 8), entry("alloc", 900, 8), entry("free_completed", 100), entry("alloc", 100, 4)]
    events, steps = _ordered(trace, [(100, 200)], [0, 2, 3, 4])
    assert events == [(0, 8), (0, 0), (3, 4)] and steps == [0, 1, 2, 3]


def test_padding_blocks_are_there_between_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    padding = PaddingSearch(torch.device("cpu"), [PaddingBlock(64, 1, 3), PaddingBlock(32, 2)])
    monkeypatch.setattr(Tape, "step", lambda *_: seen.append(sorted(t.nbytes for t in padding.held.values())))
    for _ in range(5):
        padding.perform(None, None)  # type: ignore[arg-type]
    assert seen == [[], [64], [32, 64], [32], [32]]
    padding.end_forward()
    assert not padding.held
