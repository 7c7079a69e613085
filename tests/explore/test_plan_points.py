"""Plans on the page: the planner's own figures, changed by hand as it would evaluate them, and documents that train."""

from __future__ import annotations

import itertools

import pytest

from outcore.cost.profile import profile
from outcore.errors import PlanError
from outcore.explore.plan_points import PlanTable
from outcore.job import Job
from outcore.machine import parse
from outcore.program.plan.document import Plan
from outcore.program.policies import KEEP, RECOMPUTE, kind_of_policy
from outcore.verification import verify_job
from tests.explore.jobs import write


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job.load(str(write(tmp_path_factory.mktemp("job"))))


@pytest.fixture(scope="module")
def table(job: Job) -> PlanTable:
    where = parse("v100")
    return PlanTable.of(job, profile(job, where.devices[0]), where)


def test_the_frontier_begins_with_plain_training_and_goes_down(table: PlanTable) -> None:
    *_, found = table.frontier(search_s=0.05)
    points = [table.point_json(one) for one in found]
    assert points[0]["plain"] and points[0]["over_plain"] == 1
    assert points[0]["peak_bytes"] == table.shown.memory.peak_bytes
    assert len(points) > 2
    assert table.shown.step.wait_s > 0 and points[0]["timeline"]["step_s"] == pytest.approx(points[0]["time_s"])
    for one, next_one in itertools.pairwise(points):
        assert next_one["peak_bytes"] < one["peak_bytes"] and next_one["over_plain"] >= one["over_plain"]
    for point in points:
        longest = max(row[4] + row[5] for row in point["timeline"]["events"]) / 1e6
        assert longest <= point["timeline"]["step_s"] * 1.001
        held = [m["peak_bytes"] for m in point["timeline"]["memory"]]
        assert held == [pytest.approx(point["peak_bytes"], rel=1e-6)]
        weights = sum(table.shown.costs.parameters.values())  # they stay when backward is over
        assert point["timeline"]["memory"][0]["bytes"][-1] >= weights > 1
        kinds = {row[2] for row in point["timeline"]["events"]}
        assert {point["timeline"]["kinds"][k] for k in kinds} >= {"forward", "backward"}


def test_a_block_changed_by_hand_is_what_the_model_evaluates(table: PlanTable) -> None:
    made = table.by_hand({}, {"first": "recompute"})
    assert made.policy and all(how == RECOMPUTE for how in made.policy.values())
    assert all(name.startswith("first.") for name in made.policy)
    again = table.model.evaluate(made.policy)
    assert (made.outcome.peak_bytes, made.outcome.time_s) == (again.peak_bytes, again.time_s)
    assert made.outcome.time_s > table.model.plain_s
    row = table.point_json(made)["blocks"]["first"]
    assert row["recompute"] and row["seconds"] == pytest.approx(made.outcome.extra_s)
    back = table.by_hand({k: str(v) for k, v in made.policy.items()}, {"": "keep"})
    assert not back.policy and back.outcome.peak_bytes == table.plain().outcome.peak_bytes


@pytest.mark.parametrize(
    ("policy", "change", "said"),
    [
        ({"nothing#0:out": "recompute"}, {}, "no buffer"),
        ({}, {"nothing": "recompute"}, "no block"),
        ({}, {"first": "forget"}, "not known"),
        ({"first.conv#0:out": "encode:"}, {}, "not known"),
    ],
)
def test_what_is_not_known_is_refused(
    table: PlanTable, policy: dict[str, str], change: dict[str, str], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        table.by_hand(policy, change)


def test_the_document_of_a_point_trains_as_plain_pytorch(job: Job, table: PlanTable) -> None:
    made = table.by_hand({}, {"first": "recompute", "second": "recompute"})
    plan = Plan.from_json(table.document(made).to_json())
    plan.validate(job.capture(job.size))
    assert plan.policy and set(plan.policy.values()) == {"recompute"}
    verdict = verify_job(job, plan=plan, size=2, steps=1, device="cpu")
    assert verdict.grade == "bitwise equal"


def test_every_policy_that_a_select_offers_can_be_taken_somewhere(table: PlanTable) -> None:
    for kind in ("recompute", "offload"):
        made = table.by_hand({}, {"": kind})
        assert kind in {kind_of_policy(how) for how in made.policy.values()}
    assert all(how != KEEP for how in table.by_hand({}, {"": "recompute"}).policy.values())
