"""Equal stages with F = 1 and B = 2 take what the closed forms say, exactly, and hold what can be derived.

With free links the memory of a rank whose stages save one byte per micro-batch *is* its number of micro-batches in
flight:
- model parallel: a rank's order is F0 B0 F1 B1 …: 1.
- GPipe: all m forwards come before the first backward: m.
- 1F1B: rank r runs D - 1 - r forwards, then a forward before each backward: min(m, D - r).
- GEMS: a rank's order is F0 B0 F1' B1' F2 B2 …, a batch's backward always before the next batch's forward, whichever
  replica that is on: one batch on each rank, over both replicas; with m micro-batches in each batch, m.
"""

import time

import pytest

from outcore.program import Stages, Timeline, compile_program, simulate

DEPTHS = range(2, 17)
COUNTS = range(1, 17)


def step(depth: int, schedule: str, *, micro_batches: int = 1, batches: int = 1) -> tuple[Timeline, tuple[int, ...]]:
    stages = Stages.uniform(depth, saved_bytes=1)
    program = compile_program(stages, schedule, micro_batches=micro_batches, batches=batches)
    timeline = simulate(program, stages)
    assert timeline.peak_bytes == program.in_flight()
    return timeline, program.in_flight()


@pytest.mark.parametrize("depth", DEPTHS)
def test_model_parallel_takes_three_times_depth_for_each_batch_and_holds_one(depth: int) -> None:
    for eta in COUNTS:
        timeline, in_flight = step(depth, "model-parallel", batches=eta)
        assert timeline.step_s == 3 * depth * eta
        assert in_flight == (1,) * depth
        assert timeline.bubble == pytest.approx(1 - 1 / depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_gpipe_fills_once_and_holds_every_micro_batch(depth: int) -> None:
    for m in COUNTS:
        timeline, in_flight = step(depth, "gpipe", micro_batches=m)
        assert timeline.step_s == 3 * (m + depth - 1)
        assert in_flight == (m,) * depth
        assert timeline.bubble == pytest.approx((depth - 1) / (m + depth - 1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_one_f_one_b_takes_the_same_and_holds_no_more_than_the_depth_below(depth: int) -> None:
    for m in COUNTS:
        timeline, in_flight = step(depth, "1f1b", micro_batches=m)
        assert timeline.step_s == 3 * (m + depth - 1)
        assert in_flight == tuple(min(m, depth - rank) for rank in range(depth))


@pytest.mark.parametrize("depth", DEPTHS)
def test_gems_overlaps_forwards_with_backwards_and_holds_one_batch(depth: int) -> None:
    for eta in COUNTS:
        timeline, in_flight = step(depth, "gems-master", batches=eta)
        assert timeline.step_s == depth + 2 * depth * eta + eta - 1
        assert in_flight == (1,) * depth


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_gems_with_micro_batches_holds_one_batch_of_them(depth: int) -> None:
    for m in (1, 2, 5):
        timeline, in_flight = step(depth, "gems-master", micro_batches=m, batches=4)
        assert in_flight == (m,) * depth
        assert timeline.step_s <= 4 * 3 * (m + depth - 1)


def test_gems_gains_at_most_one_and_a_half_and_loses_to_gpipe_with_two_micro_batches() -> None:
    for depth in DEPTHS:
        for count in (2, 4, 16):
            plain, gems = (step(depth, s, batches=count)[0].step_s for s in ("model-parallel", "gems-master"))
            assert plain / 1.5 < gems < plain
            assert step(depth, "gpipe", micro_batches=2, batches=count // 2)[0].step_s < gems


@pytest.mark.parametrize("schedule", ["model-parallel", "gpipe", "1f1b", "gems-master"])
def test_data_parallel_replicas_change_nothing_but_the_reduction(schedule: str) -> None:
    stages = Stages.uniform(5, saved_bytes=1)
    alone, three = (simulate(compile_program(stages, schedule, micro_batches=3, replicas=r), stages) for r in (1, 3))
    assert alone.step_s == three.step_s
    assert three.peak_bytes == alone.peak_bytes * 3


@pytest.mark.parametrize("schedule", ["gpipe", "gems-master"])
def test_a_thousand_ranks_take_seconds(schedule: str) -> None:
    stages = Stages.uniform(1024, saved_bytes=1, edge_bytes=1, gradient_bytes=1)
    start = time.process_time()
    timeline = simulate(compile_program(stages, schedule, micro_batches=8), stages)
    seconds = time.process_time() - start
    print(f"{schedule}: 1,024 ranks x 8 micro-batches, {len(timeline.events):,} events in {seconds:.1f} s")
    assert seconds < 10
