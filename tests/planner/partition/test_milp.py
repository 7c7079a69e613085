"""The integer program: neither the unit of time nor that of memory matters, however small or large."""

from __future__ import annotations

import random

import pytest

from outcore.planner import Pipeline, RankLink
from outcore.planner.partition.milp import MilpObjective, solve_integer
from tests.planner.nets import build, valid_cuts

DRAWN = random.Random(5)
INPUTS = [[-1], [0], [0], [1, 2], [3], [1, 4], [5], [6, 0]]
TIMES = [DRAWN.randint(1, 40) for _ in INPUTS]
SIZES = [DRAWN.randint(1, 40) for _ in INPUTS]


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_the_best_cut_by_time_in_any_unit(unit: float) -> None:
    net = build(INPUTS, [unit * t for t in TIMES], sizes=SIZES)
    link, pipeline = RankLink(bytes_per_s=2 / unit, latency_s=unit), Pipeline("1f1b", 4)
    aim = MilpObjective.step(net.pieces, pipeline, link, float("inf"))
    exact = solve_integer(net.pieces, 3, pipeline, aim)
    assert exact is not None
    steps = {tuple(cut): pipeline.step_s(net.pieces.cut(cut, 3), link) for cut in valid_cuts(net.pieces, 3)}
    assert steps[tuple(exact)] == pytest.approx(min(steps.values()), rel=1e-6)
    assert max(steps.values()) > 1.2 * min(steps.values())


@pytest.mark.parametrize("unit", [1, 2**33])
def test_the_best_cut_by_memory_in_any_unit_and_within_a_cap(unit: int) -> None:
    keeps = [{i} for i in range(len(INPUTS))]
    net, pipeline = build(INPUTS, TIMES, sizes=[unit * s for s in SIZES], keeps=keeps), Pipeline("gpipe", 4)
    peaks = {tuple(c): max(pipeline.peak_bytes(net.pieces.cut(c, 3))) for c in valid_cuts(net.pieces, 3)}
    exact = solve_integer(net.pieces, 3, pipeline, MilpObjective(memory=1.0))
    assert exact is not None and peaks[tuple(exact)] == min(peaks.values())
    cap = sorted(set(peaks.values()))[2]
    quick = solve_integer(net.pieces, 3, pipeline, MilpObjective(busiest=1.0, cap_bytes=cap))
    assert quick is not None and peaks[tuple(quick)] <= cap
    busy = {c: max(s.forward_s + s.backward_s for s in net.pieces.cut(list(c), 3).stages) for c in peaks}
    assert busy[tuple(quick)] == pytest.approx(min(busy[c] for c in busy if peaks[c] <= cap))
    less = 0.99 * min(peaks.values())
    assert solve_integer(net.pieces, 3, pipeline, MilpObjective(busiest=1.0, cap_bytes=less)) is None
