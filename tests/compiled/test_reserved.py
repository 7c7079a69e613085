"""What an allocator reserves for the lifetimes of a compiled step, played without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outcore.allocator.caching_allocator import reserved_by
from outcore.allocator.process_limit import limit_for
from outcore.compiled.lifetimes import Held, StepOfGraph, Way, step_of
from outcore.compiled.pieces import Piece, PieceChooser, choose_all_reserved, peak_of, smaller, within
from outcore.compiled.reserved import Allocator, choose_reserved, step_events
from outcore.compiled.search import Frontier, search
from tests.compiled.oracle import living_peak
from tests.compiled.test_search import joint, point

MIB = 2**20


def larger(step: StepOfGraph, times: int) -> StepOfGraph:
    """The same step with larger buffers."""
    held = {name: [replace(h, bytes=times * h.bytes) for h in getattr(step, name)] for name in ("forward", "backward")}
    grown = replace(step, peak_bytes=times * step.peak_bytes, forward_bytes=times * step.forward_bytes)
    return replace(grown, forward=held["forward"], backward=held["backward"])


@pytest.mark.parametrize("seed", range(12))
def test_what_comes_goes_and_lives_as_the_lifetimes_say(seed: int) -> None:
    draw, graph = random.Random(seed), joint()
    values = [i for i in range(len(graph.nodes)) if graph.tensor[i] and not graph.is_backward[i] and not graph.given[i]]
    step = step_of(graph, draw.sample(values, draw.randint(0, len(values))))
    assert living_peak(step) == step.peak_bytes
    beside = Allocator(workspace_bytes=(4096, 8192), state_bytes=(1024, 512))
    alive: dict[int, int] = {}
    for name, size in step_events([step], beside):
        if size:
            alive[name] = size
        else:
            del alive[name]
    assert sorted(alive.values()) == sorted((*beside.workspace_bytes, *beside.state_bytes))


def test_holes_between_buffers_are_counted_as_by_hand() -> None:
    # 30 MiB come, 12 stay behind them, the 30 go: 40 more do not fit into that hole.
    forward = [Held(1, 30 * MIB, 0, 1), Held(2, 12 * MIB, 1, 3), Held(3, 40 * MIB, 2, 3)]
    backward = [Held(2, 12 * MIB, -1, 0), Held(3, 40 * MIB, -1, 0), Held(4, MIB // 2, 0, 1)]
    step = replace(point(52 * MIB, 1.0, 52 * MIB), forward=forward, backward=backward)
    living = 52 * MIB + MIB // 2
    # 40 for the first, 60 with the second, 100 with the third; two for the gradient, among the small ones.
    assert Allocator().overhead([step]) == 102 * MIB - living
    # Under a limit, what is reserved (60) and the whole third request are compared with it; then come the two.
    assert Allocator(limited=True).overhead([step]) == 102 * MIB - living
    large = [*forward[:2], replace(forward[2], bytes=57 * MIB)]
    step = replace(step, forward=large, backward=[backward[0], replace(backward[1], bytes=57 * MIB), backward[2]])
    limit = 60 * MIB + 58 * MIB  # torch asks for a multiple of two, and has 18 of them at the end of the segment
    assert Allocator(limited=True).overhead([step]) == max(limit, 102 * MIB) - (69 * MIB + MIB // 2)
    assert Allocator().overhead([step]) == 102 * MIB - (69 * MIB + MIB // 2)


@pytest.mark.parametrize("limited", [False, True])
def test_the_overhead_is_what_the_allocators_own_simulation_reserves(limited: bool) -> None:
    for place, saved in enumerate(search(joint()).points[::3]):
        step = larger(saved, 997 * (1 + place))
        beside = Allocator((32 * MIB, 32 * MIB), (5 * MIB, 700_000), limited=limited)
        events = list(step_events([step], beside))
        living, most, sizes = 0, 0, dict[int, int]()
        for name, size in events:
            sizes.setdefault(name, -(-size // 512) * 512)
            living += sizes[name] if size else -sizes[name]
            most = max(most, living)
        reserved = reserved_by(events)
        found = beside.overhead([step]) + most
        assert found >= reserved if limited else found == reserved
        assert limited or limit_for([], reserved) == reserved


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_choice_with_room_for_its_holes_is_taken(seed: int) -> None:
    draw = random.Random(seed)
    sizes = sorted({draw.randint(10, 400) * MIB for _ in range(30)}, reverse=True)
    holes = {size: draw.randint(0, 60) * MIB for size in sizes}

    def choose(room: int) -> int | None:
        return next((size for size in sizes if size <= room), None)

    for budget in range(0, 420 * MIB, 20 * MIB):
        found = choose_reserved(choose, lambda size: size, holes.__getitem__, budget)
        assert (found is None) == (choose(budget) is None)
        if found is not None and found + holes[found] > budget:  # then the trial decides, on the one that is nearest
            assert choose(budget) is not None and found <= budget
        if found == choose(budget):
            continue
        first = choose(budget)
        assert first is not None and first + holes[first] > budget


def test_pieces_leave_room_for_their_holes() -> None:
    frontier = Frontier([larger(p, 4099) for p in search(joint()).points])
    fast = frontier.points[0]
    allocator = Allocator((32 * MIB, 32 * MIB))
    budget = fast.peak_bytes + allocator.overhead([fast]) // 2
    assert frontier.within(budget) is fast
    chooser = PieceChooser(budget, joint().rates, allocator=allocator)
    alone = chooser._alone(frontier)
    together = choose_all_reserved([frontier], budget, allocator)
    assert together == [alone] and alone is not fast
    assert alone.peak_bytes + allocator.overhead([alone]) <= budget
    assert choose_all_reserved([frontier, frontier], None, allocator) == [fast, fast]
    two = choose_all_reserved([frontier, frontier], int(1.6 * peak_of([fast])), allocator)
    assert two is not None and peak_of(two) + allocator.overhead(two) <= int(1.6 * peak_of([fast]))


def test_after_a_choice_that_did_not_fit_comes_another_and_before_a_refusal_the_smallest() -> None:
    points = [replace(point(size, 100.0 - size, size), saved=frozenset([size])) for size in (90, 70, 50, 30)]
    known = [Piece(Frontier(points), points[0], ())]
    asked: list[object] = [[p.kept for p in known]]
    found = []
    for budgets in ((20, 75), (20, 75), (55, 20), (55, 20)):  # less than there is at first; then what was tried
        tried = smaller(known, budgets, asked, None, staying_first=False)
        found.append(tried[0].chosen.peak_bytes if tried is not None else None)
        asked.append([p.kept for p in tried] if tried is not None else None)
    assert found == [70, 30, 50, None]


def test_values_leave_the_device_only_where_that_is_worth_it() -> None:
    """One graph in which values leave is compiled with less freedom, which is more than a small gain."""
    away = (Way(0, None, 0),)
    for gain, leaves in ((0.02, False), (0.2, True)):
        points = [point(90, 1.0, 90), replace(point(50, 1.5 * (1 - gain), 50), ways=away), point(50, 1.5, 50)]
        known = [Piece(Frontier(points, staying=[points[0], points[2]]), points[0], ())]
        for budget, wanted in ((100, False), (60, leaves)):
            found = within(known, budget, None, staying_first=False)
            assert found is not None and bool(found[0].chosen.ways) is wanted
        found = within(known, 60, None, staying_first=True)
        assert found is not None and not found[0].chosen.ways
    small = [replace(point(40, 2.0, 40), ways=away)]
    known = [Piece(Frontier([*points, *small], staying=[points[0], points[2]]), points[0], ())]
    for first in (True, False):
        found = within(known, 45, None, staying_first=first)
        assert found is not None and found[0].chosen.ways  # nothing else is within the budget
