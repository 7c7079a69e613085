"""The synthesised order is never worse than the best named schedule, keeps the cap, and is often better."""

import random
import statistics

import pytest

from outcore.errors import ProgramError
from outcore.machine import Link
from outcore.program import Edge, Links, Stage, Stages, SynthesisCandidate, check, simulate, synthesise
from outcore.program.synthesis.synthesis import named_programs
from tests.program.networks import random_stages
from tests.program.toy import Toy

ONE, TWO, NAMED = "synthesised, one replica", "synthesised, two inverted replicas", "a named schedule"
WIRE = Links(Link.symmetric(bandwidth_bytes_per_s=16.0, latency_s=0.05))


def test_it_is_never_worse_and_how_often_it_is_better_is_printed() -> None:
    """Random stages, half of the times with slow links, each under a cap that some named schedule just meets."""
    gains: dict[str, list[float]] = {ONE: [], TWO: [], NAMED: []}
    for seed in range(30):
        rng = random.Random(seed)
        network, count = random_stages(rng, rng.randint(2, 5)), rng.randint(2, 8)
        links = WIRE if rng.random() < 0.5 else None
        named = [simulate(program, network, links) for program in named_programs(network, count)]
        cap = rng.choice(sorted({max(timeline.peak_bytes) for timeline in named}))
        choice = synthesise(network, micro_batches=count, links=links, memory_bytes=cap)
        assert choice.best_named is not None
        assert choice.best.step_s <= choice.best_named.step_s
        check(choice.best.program, network, memory_bytes=cap, links=links)
        gains[kind_of(choice.best)].append(choice.gain)
    total = sum(map(len, gains.values()))
    for kind, found in gains.items():
        middle, most = statistics.median(found or [1.0]), max(found, default=1.0)
        print(f"{kind}: best in {len(found)} of {total}, {middle:.3f}x median, {most:.3f}x at most")
    assert len(gains[NAMED]) < total


def kind_of(candidate: SynthesisCandidate) -> str:
    if candidate.named:
        return NAMED
    return TWO if len(candidate.program.holders()[0]) > 1 else ONE


@pytest.mark.parametrize(("depth", "count"), [(2, 2), (4, 4), (4, 8), (6, 6)])
def test_two_inverted_replicas_fill_the_bubble_of_equal_stages(depth: int, count: int) -> None:
    choice = synthesise(Stages.uniform(depth, saved_bytes=1), micro_batches=count)
    best, named = choice.best, choice.best_named
    assert named is not None and named.step_s == 3 * (count + depth - 1)
    assert 3 * count <= best.step_s < named.step_s
    print(f"D = {depth}, m = {count}: {named.step_s:g} by {named.program.name}, {best.step_s:g} {best.program.name}")


def test_a_cap_of_one_micro_batch_leaves_gems() -> None:
    choice = synthesise(Stages.uniform(4, saved_bytes=10), micro_batches=4, memory_bytes=10)
    assert choice.best_named is not None and choice.best_named.program.name == "gems-master"
    assert choice.best.step_s <= 4 + 2 * 4 * 4 + 4 - 1


def test_a_cap_per_rank_where_the_first_stage_saves_most() -> None:
    """A large first stage: two of its micro-batches fit where 1F1B would want three; the order works around it."""
    stages = [Stage((), 1.0, 2.0, saved, 0, 1, 1, 0) for saved in (100, 30, 10)]
    network = Stages(tuple(stages), tuple(Edge(f"x{i}", i, (i + 1,), 1, True) for i in range(2)))
    choice = synthesise(network, micro_batches=6, memory_bytes=[215, 215, 215])
    assert choice.best.fits and max(choice.best.timeline.peak_bytes) <= 215
    assert choice.gain > 1


def test_what_cannot_fit_is_refused_with_the_smallest_cap_that_works() -> None:
    network = Stages.uniform(3, saved_bytes=1 << 20)
    with pytest.raises(ProgramError, match=r"the smallest that works is 1.0 MiB"):
        synthesise(network, micro_batches=4, memory_bytes=1000)
    with pytest.raises(ProgramError, match="got 2 memory caps"):
        synthesise(network, micro_batches=4, memory_bytes=[1, 2])


def test_synthesised_orders_with_replicas_compute_the_right_gradients() -> None:
    for seed in range(6):
        network = random_stages(random.Random(seed), 4)
        choice = synthesise(network, micro_batches=4, replicas=2)
        reference = next(iter(named_programs(network, 4, 2)))
        ours, plain = (Toy(p, network, random.Random(seed)) for p in (choice.best.program, reference))
        ours.run()
        plain.run()
        for (_, stage), gradient in ours.updated.items():
            assert gradient == next(g for (_, s), g in plain.updated.items() if s == stage)
        assert str(choice).splitlines()[0].split() == ["step", "peak", "schedule"]
