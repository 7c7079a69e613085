"""Orders without a name: found where they are faster, within the cap, and carried by the plan."""

from __future__ import annotations

import pytest

from outcore.machine import Link
from outcore.planner import plan as make_plan
from outcore.planner.pipeline.candidates import Candidate
from outcore.planner.pipeline.lower import predict_timeline, simulate_candidate
from outcore.planner.pipeline.order_search import best_order
from outcore.planner.pipeline.schedule_model import SCHEDULES, Pipeline, RankLink
from outcore.program import Links, Stages
from outcore.program.plan.document import Plan
from tests.planner.nets import build

FAST = RankLink(1e15, 1e-9)


@pytest.mark.parametrize(("depth", "pieces"), [(2, 4), (4, 8)])
def test_it_beats_the_named_schedules_on_equal_stages(depth: int, pieces: int) -> None:
    stages = Stages.uniform(depth, saved_bytes=1)
    candidate = Candidate(depth, 1, Pipeline("1f1b", pieces))
    found = best_order(stages, candidate, None, FAST)
    assert found is not None
    named = simulate_candidate(stages, candidate.pipeline, 1, FAST)
    assert found[0].time_s < named.time_s == pytest.approx(3 * (pieces + depth - 1))
    assert found[1].pipeline.pieces == pieces and len(found[1].order) == depth
    Plan("0", tuple((str(k),) for k in range(depth)), found[1].pipeline.schedule,
         found[1].pipeline.micro_batches, found[1].pipeline.batches, order=found[1].order)  # fmt: skip


def test_a_cap_is_kept_and_large_steps_are_left_alone() -> None:
    stages = Stages.uniform(3, saved_bytes=10)
    for cap in (10, 20, 30):
        found = best_order(stages, Candidate(3, 1, Pipeline("1f1b", 6)), cap, FAST)
        assert found is not None and max(found[0].peak_bytes) <= cap
    assert best_order(stages, Candidate(3, 1, Pipeline("1f1b", 6)), 5, FAST) is None
    assert best_order(stages, Candidate(3, 1, Pipeline("1f1b", 600)), None, FAST) is None
    assert best_order(Stages.uniform(1), Candidate(1, 1, Pipeline("model_parallel", 1, 6)), None, FAST) is None


def test_a_plan_carries_the_order_and_its_timeline_says_the_same() -> None:
    net = build([[i - 1] for i in range(8)], [1.0] * 8, parameters=[1] * 8, batch=7)  # which two replicas cannot share
    given = {"devices": 2, "link": FAST}
    found = make_plan(net.graph, net.weights, **given)
    named = [make_plan(net.graph, net.weights, schedule=name, **given) for name in SCHEDULES]
    assert found.predicted is not None and found.order and not any(plan.order for plan in named)
    assert all(plan.predicted and found.predicted.time_s < plan.predicted.time_s for plan in named)
    link = Link.symmetric(bandwidth_bytes_per_s=FAST.bytes_per_s, latency_s=FAST.latency_s)
    timeline = predict_timeline(found, net.graph, net.weights, Links(link))
    assert timeline.step_s == pytest.approx(found.predicted.time_s, rel=1e-6)
    print(found)
