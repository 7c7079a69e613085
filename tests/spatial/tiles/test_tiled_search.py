"""Where no rank can hold its part of the image, ranks stream their parts: which tiles, and what is said of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.predicted.estimate import estimate
from outcore.errors import PlanError
from outcore.machine import parse
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.spatial.plan import GridSearch
from outcore.spatial.tiles.tiled_search import TiledSearch
from outcore.spatial.timeline import predict_timeline
from outcore.stream import PixelLoss

FOUR = "v100x4"


def _net(*, head: bool = False, dropout: bool = False) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    dropped = [nn.Dropout(0.5)] if dropout else []
    rest = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)] if head else [nn.Conv2d(8, 2, 1)]
    return nn.Sequential(*layers, *dropped, *rest)


def _graph(pixels: int = 512, batch: int = 1, **kind: bool) -> outcore.Graph:
    return outcore.capture(_net(**kind), torch.empty(batch, 3, pixels, pixels, device="meta"))


def _job(pixels: int = 512, size: int = 1) -> outcore.Job:
    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 3, pixels, pixels), torch.randint(2, (n, pixels, pixels))

    return outcore.Job(model=_net, batch=batch, loss=PixelLoss(F.cross_entropy), size=size)


def _search(graph: outcore.Graph, limit: int, **options: object) -> TiledSearch:
    machine = parse(FOUR)
    weights = weights_on(machine, graph, estimate(graph, machine), None)
    search = GridSearch(graph, weights, links_of(machine))
    return TiledSearch(search, 4, limit, **{"replicas": [1], **options})  # type: ignore[arg-type]


def _peak(plan: outcore.Plan) -> int:
    assert plan.predicted is not None
    return max(plan.predicted.peak_bytes)


def test_an_image_that_no_grid_holds_is_streamed_by_every_rank() -> None:
    graph = _graph(head=True)
    roomy = outcore.plan(graph, devices=4, machine=FOUR)
    assert "tile" not in (roomy.spatial or {})
    tight = outcore.plan(graph, devices=4, machine=FOUR, memory=_peak(roomy) // 3)
    assert tight.spatial is not None and tight.spatial["grid"] == [2, 2] and _peak(tight) <= _peak(roomy) // 3
    assert tight.arrangement.startswith("image over 2 x 2 ranks in tiles of ") and tight.ranks == 4
    assert any("no stages do" in line for line in tight.why) and any("every rank streams" in line for line in tight.why)
    tight.validate(graph, ranks=4)
    assert outcore.Plan.from_json(tight.to_json()) == tight


def test_the_timeline_of_tiles_says_what_their_plan_says() -> None:
    graph = _graph(head=True)
    search = _search(graph, 2**22)
    (plan,) = search.plans(float("inf"))
    timeline = predict_timeline(plan, graph, search.search.weights, search.search.links)
    assert plan.predicted is not None
    assert timeline.step_s == pytest.approx(plan.predicted.time_s) and timeline.peak_bytes == plan.predicted.peak_bytes
    assert {event.kind for event in timeline.events} >= {"forward", "backward", "halo", "step"}


def test_more_memory_has_larger_tiles_that_take_no_longer() -> None:
    graph, before = _graph(head=True), None
    for limit in (2**21, 2**22, 2**24):
        (plan,) = _search(graph, limit).plans(float("inf"))
        assert plan.predicted is not None and plan.spatial is not None and _peak(plan) <= limit
        found = max(plan.spatial["tile"]), plan.predicted.time_s
        assert before is None or (found[0] > before[0] and found[1] < before[1])
        before = found


def test_replicas_of_one_rank_each_stream_samples_of_their_own() -> None:
    graph = _graph(batch=4, head=True)
    search = _search(graph, 2**23, replicas=[1, 2, 4])
    plans = {plan.replicas: plan for plan in search.plans(float("inf"))}
    assert plans.keys() == {1, 2, 4} and plans[4].grid == (1, 1) and plans[4].ranks == 4
    assert plans[4].arrangement.startswith("image on one rank in tiles of ") and "4 replicas" in plans[4].arrangement
    assert all(_peak(plan) <= 2**23 for plan in plans.values())


def test_a_loss_over_pixels_is_taken_in_parts() -> None:
    job = _job()
    roomy = outcore.plan(job, devices=2, machine="v100x2", batch=1)
    plan = outcore.plan(job, devices=2, machine="v100x2", batch=1, memory=_peak(roomy) // 4)
    assert plan.spatial is not None and plan.spatial["loss"] == "parts" and "tile" in plan.spatial


def test_nothing_slower_than_what_is_known_is_looked_at() -> None:
    search = _search(_graph(), 2**40)
    assert list(search.plans(1e-9)) == [] and search.least_bytes == 0


def test_what_no_tile_holds_is_refused_with_the_least() -> None:
    with pytest.raises(PlanError, match="in the smallest tiles, "):
        outcore.plan(_graph(head=True), devices=4, machine=FOUR, memory=50_000)


def test_networks_that_draw_random_numbers_in_tiles_or_have_no_image_have_none() -> None:
    assert list(_search(_graph(dropout=True), 2**40).plans(float("inf"))) == []
    flat = outcore.capture(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(4, 4))
    assert list(_search(flat, 2**40).plans(float("inf"))) == []


def test_a_batch_that_is_not_shared_is_taken_by_every_replica() -> None:
    graph = _graph(batch=2, head=True)
    (shared,) = _search(graph, 2**30, replicas=[4]).plans(float("inf"))
    (apart,) = _search(graph, 2**30, replicas=[4], shared=False).plans(float("inf"))
    assert shared.predicted is not None and apart.predicted is not None
    assert apart.predicted.time_s > 2 * shared.predicted.time_s
