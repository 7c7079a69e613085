"""Stages, replicas or a grid: which of them `outcore.plan` takes, and the timelines of plans with a grid."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.machine import parse
from outcore.machine.link import Link
from outcore.planner.pipeline.plan_job import links_of, plan_stages, weights_on
from outcore.program import Backward, Forward, Links
from outcore.program.simulator.links import LinkSchedule
from outcore.program.simulator.part_time import PartCompute, PartSend, PartWait, perform_parts
from outcore.program.timeline import Event
from outcore.spatial.mixed import mixed_plans
from outcore.spatial.plan import GridSearch
from outcore.spatial.timeline import predict_timeline

FOUR = "v100x4"


def _graph(batch: int = 4, pixels: int = 256, head: bool = False) -> outcore.Graph:
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    more = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)] if head else []
    return outcore.capture(nn.Sequential(*layers, *more), torch.empty(batch, 3, pixels, pixels, device="meta"))


def test_messages_that_are_computed_over_cost_nothing() -> None:
    links = Links(Link.symmetric(bandwidth_bytes_per_s=1e6, latency_s=0.25))
    halo = PartSend("x", ((0, 1, 1_000_000), (1, 0, 500_000)))
    events: list[Event] = []
    script = (PartCompute((1.0, 2.0)), halo, PartCompute((0.5, 4.0)), PartWait("x"), PartCompute((1.0, 1.0)))
    ends = perform_parts(script, Forward(0, 0), (4, 5), (0.0, 0.0), LinkSchedule(links), events)
    # Rank 5 sends at 2 s, half a second and a latency long; rank 4's megabyte arrives while rank 5 still computes.
    assert ends == pytest.approx([2.75 + 1.0, 6.0 + 1.0])
    assert sum(e.end_s - e.start_s for e in events if e.rank == 4 and e.stream == "compute") == pytest.approx(2.5)
    assert {e.rank for e in events} == {4, 5} and all(e.kind in ("forward", "halo") for e in events)
    assert perform_parts(script, Backward(0, 0), (4, 5), (0.0, 0.0), LinkSchedule(Links()), []) == [2.5 + 0.5, 7.0]
    # On one processor nobody computes while another does: all that both compute, one after the other.
    shared: list[Event] = []
    ends = perform_parts(script, Forward(0, 0), (4, 5), (0.0, 0.0), LinkSchedule(replace(links, processors=1)), shared)
    busy = sorted((e.start_s, e.end_s) for e in shared if e.stream == "compute")
    assert max(ends) >= 9.5 and all(a <= b for (_, a), (b, _) in itertools.pairwise(busy))
    assert sum(b - a for a, b in busy) == pytest.approx(9.5)


def test_a_message_of_a_part_takes_the_hosts_at_its_ends_some_time() -> None:
    links = Links(Link.symmetric(bandwidth_bytes_per_s=1e6, latency_s=0.25, host_s=0.125))
    script = (PartCompute((1.0, 2.0)), PartSend("x", ((0, 1, 500_000), (1, 0, 500_000))), PartWait("x"))
    events: list[Event] = []
    ends = perform_parts(script, Forward(0, 0), (0, 1), (0.0, 0.0), LinkSchedule(links), events)
    # What rank 1 sends leaves at 2.125 s and takes 0.75; what it gets has come by then. Receiving takes both again.
    assert ends == pytest.approx([2.125 + 0.75 + 0.125, 2.125 + 0.125])
    assert sum(e.end_s - e.start_s for e in events if e.rank == 0 and e.stream == "compute") == pytest.approx(1.25)
    more = (PartCompute((1.0, 2.0)), PartSend("x", ((0, 1, 500_000), (1, 0, 500_000)), 0.5), PartWait("x"))
    assert perform_parts(more, Forward(0, 0), (0, 1), (0.0, 0.0), LinkSchedule(links), []) == [3.25 + 0.5, 3.0]


@pytest.mark.parametrize(("head", "replicas", "batches"), [(False, 1, 1), (True, 2, 2)])
def test_the_timeline_of_a_grid_says_what_its_plan_says(head: bool, replicas: int, batches: int) -> None:
    graph, where = _graph(pixels=64, head=head), parse("v100x8")
    search = GridSearch(graph, weights_on(where, graph), links_of(where))
    plan = search.plan(search.choice((2, 2)), replicas=replicas, batches=batches)
    plan.validate(graph, ranks=4 * replicas)
    timeline = predict_timeline(plan, graph, search.weights, search.links)
    assert plan.predicted is not None and timeline.step_s == plan.predicted.time_s
    assert timeline.peak_bytes[:4] == plan.predicted.peak_bytes
    assert {e.rank for e in timeline.events if e.kind == "halo"} == set(range(plan.ranks))
    kinds = {(e.kind, e.stream) for e in timeline.events}
    assert {("forward", "compute"), ("backward", "compute"), ("reduce", "reduce"), ("halo", "send")} <= kinds


def test_the_faster_of_stages_and_grids_is_taken_and_says_so() -> None:
    graph, where = _graph(pixels=48), parse(FOUR)
    fits = outcore.plan(graph, machine=where)
    assert fits.spatial is None and any("image over" in line for line in fits.why)
    with pytest.raises(PlanError, match="grids that share the image"):
        outcore.plan(graph, machine=where, memory=1 << 18)


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [64, 256])
def test_the_faster_of_stages_and_grids_is_taken_under_a_tight_budget(pixels: int) -> None:
    graph, where = _graph(pixels=pixels), parse(FOUR)
    search = GridSearch(graph, weights_on(where, graph), links_of(where))
    grid = search.plan(search.choice((2, 2)), batches=4)
    assert grid.predicted is not None
    tight = max(grid.predicted.peak_bytes) + (1 << 20)
    costs = outcore.estimate(graph, machine=where)  # the same for both: `plan` itself would look at a part of the batch
    chosen = outcore.plan(graph, machine=where, memory=tight, costs=costs)
    assert chosen.predicted is not None and max(chosen.predicted.peak_bytes) <= tight
    try:
        other = plan_stages(graph, costs, where, devices=4, memory_bytes=tight).predicted
    except PlanError:
        other = None
    assert chosen.predicted.time_s <= 1.01 * min(p.time_s for p in (grid.predicted, other) if p is not None)
    assert any("image over" in line or "no stages do" in line for line in (chosen.arrangement, *chosen.why))


def test_a_link_that_is_too_slow_and_a_schedule_that_was_asked_for_leave_no_grid() -> None:
    graph = _graph(batch=1, pixels=512)
    slow = replace(parse(FOUR), between_devices=Link.symmetric(bandwidth_bytes_per_s=1e9, latency_s=0.5))
    assert outcore.plan(graph, machine=slow).spatial is None
    fast = outcore.plan(graph, machine=FOUR)
    assert fast.spatial is not None and fast.ranks == 4  # one image: nothing else uses four devices at once
    assert outcore.plan(graph, machine=FOUR, schedule="model_parallel").spatial is None


def test_a_grid_in_front_of_a_pipeline_is_a_candidate() -> None:
    """Most of the work at full size, most of the weights at the end, a batch to cut."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(16, 64, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 32 * 32, 8)]
    graph, where = outcore.capture(nn.Sequential(*layers), torch.empty(4, 3, 128, 128, device="meta")), parse(FOUR)
    search = GridSearch(graph, weights_on(where, graph), links_of(where))
    found = mixed_plans(search, 4, 4, pieces=True, within_s=float("inf"))
    assert found and all(plan.ranks == 4 and len(plan.stages) == 5 - plan.parts for plan in found)
    for plan in found:
        plan.validate(graph, ranks=4)
        timeline = predict_timeline(plan, graph, search.weights, search.links)
        assert plan.predicted is not None and timeline.step_s == pytest.approx(plan.predicted.time_s)
        assert timeline.peak_bytes == plan.predicted.peak_bytes
