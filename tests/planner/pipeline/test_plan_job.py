"""`outcore.plan`: one call from a job or a graph to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.machine import parse
from outcore.models import SlideNet
from outcore.planner import CallWeights
from outcore.planner.pipeline.lower import predict_timeline
from outcore.planner.pipeline.plan_job import links_of, plan_stages


def slides(size: int = 1) -> outcore.Job:
    return outcore.Job(model=SlideNet, batch=lambda n: (torch.rand(n, 3, 256, 256), torch.randint(2, (n,))), size=size)


def test_one_slide_for_each_device_where_nobody_said_how_many() -> None:
    made = outcore.plan(slides(), devices=4, machine="4xv100")
    assert made.arrangement == "data parallel, 4 replicas"
    assert made.why[0].startswith("a step trains on 4 samples, one for each device")


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_no_stage_is_without_work(devices: int) -> None:
    graph, where = slides().capture(1), parse(f"{devices}xv100")
    memory = where.devices[0].memory_bytes
    made = plan_stages(graph, outcore.estimate(graph, machine=where), where, devices=devices, memory_bytes=memory)
    weights = CallWeights.of(graph, outcore.estimate(graph, parse("v100")))
    timeline = predict_timeline(made, graph, weights, links_of(parse("4xv100")))
    assert len(made.stages) == devices and min(timeline.busy_s()) > 0.02 * timeline.step_s


def test_the_figures_of_a_plan_are_those_of_its_timeline() -> None:
    job, where = slides(8), parse("4xv100")
    graph = job.capture(8)
    weights = CallWeights.of(graph, outcore.estimate(graph, where))
    for schedule in (None, "gpipe", "gems"):
        made = outcore.plan(job, devices=4, machine=where, schedule=schedule)  # type: ignore[arg-type]
        timeline = predict_timeline(made, graph, weights, links_of(where))
        assert made.predicted is not None and made.predicted.bubble == timeline.bubble
        assert made.predicted.time_s == timeline.step_s
        assert timeline.name == made.arrangement


def test_the_state_of_the_job_s_own_optimizer_is_counted() -> None:
    def peak(optimizer: object) -> int:
        job = replace(slides(4), optimizer=optimizer)  # type: ignore[arg-type]
        made = outcore.plan(job, devices=2, machine="2xv100", schedule="gpipe")
        assert made.predicted is not None
        return max(made.predicted.peak_bytes)

    sgd = peak(lambda p: torch.optim.SGD(p, lr=0.1))
    assert sgd < peak(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)) < peak(lambda p: torch.optim.Adam(p))


def test_a_share_of_the_plain_step_is_a_budget_on_one_device_too() -> None:
    plain, made = (outcore.plan(slides(2), devices=1, machine="v100", memory=memory) for memory in (None, "80%"))
    assert plain.predicted is not None and made.predicted is not None
    assert made.predicted.peak_bytes[0] <= 0.8 * plain.predicted.peak_bytes[0]


def test_a_named_schedule_is_a_pipeline() -> None:
    for schedule in ("model_parallel", "gpipe", "1f1b", "gems"):
        made = outcore.plan(slides(), devices=4, machine="4xv100", schedule=schedule)  # type: ignore[arg-type]
        assert len(made.stages) > 1 and made.schedule == schedule


def test_a_batch_of_its_own_for_every_replica_is_not_divided() -> None:
    made = outcore.plan(slides().capture(1), devices=2, machine="2xv100", shared=False)
    assert made.arrangement == "data parallel, 2 replicas"


def test_one_device_is_planned_too() -> None:
    made = outcore.plan(slides(), devices=1, machine="v100", memory="2300KiB")
    assert made.ranks == 1 and made.policy


def test_the_name_of_a_candidate_is_that_of_its_plan() -> None:
    layers = [nn.Linear(64, 64) for _ in range(8)]
    with torch.device("meta"):
        graph = outcore.capture(nn.Sequential(*layers).to("meta"), torch.empty(8, 64))
    made = outcore.plan(graph, devices=4, machine="4xv100")
    assert f": {made.arrangement}" in next(line for line in made.why if line.startswith("chosen"))
    assert not any("1 stages" in line or "model_parallel, 1" in line for line in made.why)
