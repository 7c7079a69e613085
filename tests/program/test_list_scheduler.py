"""Synthesised orders keep the cap, give the right gradients, and often beat the best named schedule."""

import random
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from outcore.machine import Link
from outcore.program import Edge, Forward, Links, Program, Stage, Stages, Timeline, check, compile_program, simulate
from outcore.program.list_scheduler import synthesised_orders
from outcore.program.written_order import program_in_order, write_order
from tests.program.networks import random_stages
from tests.program.toy import Toy

ONE, TWO, NAMED = "synthesised, one replica", "synthesised, two inverted replicas", "a named schedule"
WIRE = Links(Link.symmetric(bandwidth_bytes_per_s=16.0, latency_s=0.05))


class Choice(NamedTuple):
    """A program and what it takes."""

    kind: str
    program: Program
    timeline: Timeline


def named_programs(stages: Stages, micro_batches: int, replicas: int = 1) -> Iterator[Program]:
    """Every named schedule of so many micro-batches, with every division into batches where that matters."""
    yield compile_program(stages, "model-parallel", micro_batches=micro_batches, replicas=replicas)
    yield compile_program(stages, "1f1b", micro_batches=micro_batches, replicas=replicas)
    for size in (n for n in range(1, micro_batches + 1) if micro_batches % n == 0):
        batches = micro_batches // size
        if size > 1:
            yield compile_program(stages, "gpipe", micro_batches=size, batches=batches, replicas=replicas)
        if batches > 1:
            yield compile_program(stages, "gems-master", micro_batches=size, batches=batches, replicas=replicas)


def choices(
    stages: Stages, count: int, *, links: Links | None = None, cap: int | None = None, replicas: int = 1
) -> list[Choice]:
    """Named schedules and synthesised orders that keep the cap, fastest first."""
    links = links or Links()
    found = [(NAMED, program) for program in named_programs(stages, count, replicas)]
    caps = None if cap is None else (cap,) * len(stages)
    for setting, orders in synthesised_orders(stages, count, caps, links):
        program = program_in_order(stages, write_order(orders), inverted=setting.inverted, replicas=replicas)
        found.append((TWO if setting.inverted else ONE, program))
    timed = [Choice(kind, program, simulate(program, stages, links)) for kind, program in found]
    fitting = [c for c in timed if cap is None or max(c.timeline.peak_bytes) <= cap]
    return sorted(fitting, key=lambda c: (c.timeline.step_s, c.kind != NAMED))


def best_named(found: list[Choice]) -> Choice:
    return next(c for c in found if c.kind == NAMED)


def test_how_often_an_order_is_better_than_every_named_schedule() -> None:
    """Random stages, half of the times with slow links, each under a cap that some named schedule just meets."""
    gains: dict[str, list[float]] = {ONE: [], TWO: [], NAMED: []}
    for seed in range(30):
        rng = random.Random(seed)
        network, count = random_stages(rng, rng.randint(2, 5)), rng.randint(2, 8)
        links = WIRE if rng.random() < 0.5 else None
        named = [simulate(program, network, links) for program in named_programs(network, count)]
        cap = rng.choice(sorted({max(timeline.peak_bytes) for timeline in named}))
        found = choices(network, count, links=links, cap=cap)
        best = found[0]
        check(best.program, network, memory_bytes=cap, links=links)
        gains[best.kind].append(best_named(found).timeline.step_s / best.timeline.step_s)
    total = sum(map(len, gains.values()))
    for kind, ratios in gains.items():
        middle, most = statistics.median(ratios or [1.0]), max(ratios, default=1.0)
        print(f"{kind}: best in {len(ratios)} of {total}, {middle:.3f}x median, {most:.3f}x at most")
    assert len(gains[NAMED]) < total


@pytest.mark.parametrize(("depth", "count"), [(2, 2), (4, 4), (4, 8), (6, 6)])
def test_two_inverted_replicas_fill_the_bubble_of_equal_stages(depth: int, count: int) -> None:
    found = choices(Stages.uniform(depth, saved_bytes=1), count)
    best, named = found[0].timeline.step_s, best_named(found).timeline.step_s
    assert named == 3 * (count + depth - 1)
    assert 3 * count <= best < named


@pytest.mark.parametrize(("depth", "count"), [(2, 2), (3, 4), (4, 8)])
def test_an_order_of_one_replica_takes_no_longer_than_the_best_one_there_is(depth: int, count: int) -> None:
    found = choices(Stages.uniform(depth, saved_bytes=1), count)
    assert min(c.timeline.step_s for c in found if c.kind == ONE) == 3 * (count + depth - 1)


def test_a_cap_of_one_micro_batch_leaves_gems() -> None:
    found = choices(Stages.uniform(4, saved_bytes=10), 4, cap=10)
    assert best_named(found).program.name == "gems-master"
    assert found[0].timeline.step_s <= 4 + 2 * 4 * 4 + 4 - 1


def test_a_cap_where_the_first_stage_saves_most() -> None:
    """A large first stage: two of its micro-batches fit where 1F1B would want three; the order works around it."""
    stages = [Stage((), 1.0, 2.0, saved, 0, 1, 1, 0) for saved in (100, 30, 10)]
    network = Stages(tuple(stages), tuple(Edge(f"x{i}", i, (i + 1,), 1, True) for i in range(2)))
    found = choices(network, 6, cap=215)
    assert found[0].timeline.step_s < best_named(found).timeline.step_s


def test_a_cap_below_one_micro_batch_gives_no_order() -> None:
    assert list(synthesised_orders(Stages.uniform(3, saved_bytes=1 << 20), 4, (1000,) * 3, Links())) == []


def test_orders_and_named_schedules_have_every_micro_batch_once() -> None:
    for choice in choices(Stages.uniform(2), 6):
        forwards = [i for row in choice.program.ranks for i in row if isinstance(i, Forward)]
        assert len({(i.stage, i.micro_batch) for i in forwards}) == len(forwards) == 12, choice.program.name


def test_orders_with_replicas_compute_the_right_gradients() -> None:
    for seed in range(6):
        network = random_stages(random.Random(seed), 4)
        order = next(c.program for c in choices(network, 4, replicas=2) if c.kind != NAMED)
        reference = next(named_programs(network, 4, 2))
        ours, plain = (Toy(p, network, random.Random(seed)) for p in (order, reference))
        ours.run()
        plain.run()
        for (_, stage), gradient in ours.updated.items():
            assert gradient == next(g for (_, s), g in plain.updated.items() if s == stage)
