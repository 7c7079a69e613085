"""Policies inside the stages of a pipeline: within the limit, no slower than cuts that fit by themselves."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.predicted.estimate import estimate
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine import parse
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.lower import lower
from outcore.planner.pipeline.schedule_model import Pipeline, Schedule
from outcore.planner.pipeline.search import plan
from outcore.planner.pipeline.stage_policies import StagePlanner


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.act(self.norm(self.conv(x))))


@cache
def network() -> tuple[Graph, CallWeights]:
    widths = [3, 8, 8, 8, 16, 16, 16]
    blocks = [Block(i, o, 2 if o > i > 3 else 1) for i, o in itertools.pairwise(widths)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    graph = outcore.capture(model, (torch.randn(4, 3, 32, 32),))
    return graph, CallWeights.of(graph, estimate(graph, parse("2xv100")))


def planned(memory_bytes: int | None, schedule: Schedule | None, *, policies: bool = True) -> outcore.Plan:
    graph, weights = network()
    return plan(graph, weights, devices=2, memory_bytes=memory_bytes, schedule=schedule, policies=policies)


def peak(made: outcore.Plan) -> int:
    assert made.predicted is not None
    return max(made.predicted.peak_bytes)


@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe", "gems", "model_parallel"])
def test_plans_with_policies_are_within_the_limit_and_never_slower(schedule: Schedule | None) -> None:
    free = planned(None, schedule)
    assert not free.policy
    chosen = 0
    for share in (0.8, 0.6, 0.45):
        limit = int(share * peak(free))
        try:
            without = planned(limit, schedule, policies=False)
        except PlanError:
            without = None
        try:
            made = planned(limit, schedule)
        except PlanError:
            assert without is None
            continue
        assert peak(made) <= limit
        assert made.predicted is not None
        if without is not None and without.predicted is not None:
            assert made.predicted.time_s <= 1.011 * without.predicted.time_s
        chosen += bool(made.policy)
    assert chosen or schedule in ("gpipe", "model_parallel")


def test_the_smallest_that_a_refusal_names_is_accepted() -> None:
    with pytest.raises(PlanError, match="cannot be met") as refused:
        planned(20_000, "gems")
    least = int(str(refused.value).partition("memory_bytes=")[2].partition(")")[0])
    assert peak(planned(least, "gems")) <= least


def test_what_draws_is_never_recomputed_in_a_stage() -> None:
    graph, weights = network()
    assert weights.costs is not None
    stages = lower(planned(None, "model_parallel"), graph, weights)[1]
    fitted = StagePlanner(graph, weights.costs).fitted(stages, Pipeline("model_parallel"), 1.0, 0.6 * max(
        Pipeline("model_parallel").peak_bytes(stages)
    ))  # fmt: skip
    assert fitted is not None and fitted[1]
    again = [name for name, how in fitted[1].items() if str(how) == "recompute"]
    assert again and not any(".drop#" in name for name in again)


def test_a_plan_with_policies_predicts_what_its_timeline_shows() -> None:
    graph, weights = network()
    whole = peak(planned(None, "1f1b"))
    made = next(found for share in (0.8, 0.6, 0.45) if (found := planned(int(share * whole), "1f1b")).policy)
    assert made.predicted is not None
    fraction = 1 / (made.replicas * made.micro_batches * made.batches)
    plain = lower(outcore.Plan.from_json({**made.to_json(), "policy": {}}), graph, weights)[1]
    stages = lower(made, graph, weights)[1]
    assert sum(s.backward_s for s in stages.stages) > sum(s.backward_s for s in plain.stages)
    assert sum(s.saved_bytes for s in stages.stages) < sum(s.saved_bytes for s in plain.stages)
    again = StagePlanner(graph, weights.costs).under(plain, made.policy, fraction)  # type: ignore[arg-type]
    assert again == stages
