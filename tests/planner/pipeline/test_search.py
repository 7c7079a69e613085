from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn

import outcore
from outcore import models
from outcore.cost.measured.saved_bytes import account
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner import (
    CallWeights,
    Pipeline,
    RankLink,
    plan,
    plan_vertically,
    split,
    split_vertically,
)
from outcore.planner.partition.milp import quiet
from outcore.planner.pipeline.candidates import candidates_for
from outcore.planner.pipeline.lower import predict_timeline, simulate_candidate
from outcore.program import Links
from outcore.program.plan.document import Plan
from tests.planner.nets import build
from tests.planner.shape_weights import weights_from_shapes


def chain(batch: int = 8) -> Graph:
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    with torch.device("meta"):
        model = nn.Sequential(*layers)
    return outcore.capture(model, torch.empty(batch, 512, 512, device="meta"))


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can() -> None:
    graph = chain()
    weights = weights_from_shapes(graph)
    with pytest.raises(
        PlanError, match=r"cannot be met with 2 devices.*memory_bytes=\d+\)(; or use \d+ ranks)?"
    ) as refusal:
        plan(graph, weights, devices=2, memory_bytes=1 << 20)
    smallest = int(re.search(r"memory_bytes=(\d+)", str(refusal.value)).group(1))  # type: ignore[union-attr]
    fits = plan(graph, weights, devices=2, memory_bytes=smallest)
    assert fits.predicted and max(fits.predicted.peak_bytes) <= smallest


def test_the_ranks_that_would_do_do() -> None:
    graph = chain()
    weights = weights_from_shapes(graph)
    whole = plan(graph, weights, devices=1)
    assert whole.predicted
    with pytest.raises(PlanError, match=r"or use \d+ ranks") as refusal:
        plan(graph, weights, devices=1, memory_bytes=22 << 20)
    ranks = int(re.search(r"use (\d+) ranks", str(refusal.value)).group(1))  # type: ignore[union-attr]
    assert plan(graph, weights, devices=ranks, memory_bytes=22 << 20).ranks == ranks


def test_slow_links_prefer_fewer_cuts_and_a_named_schedule_is_kept() -> None:
    graph = chain()
    weights = weights_from_shapes(graph)
    for schedule in ("model_parallel", "gpipe", "1f1b", "gems"):
        made = plan(graph, weights, devices=4, schedule=schedule)  # type: ignore[arg-type]
        assert made.schedule == schedule and made.ranks == 4
        made.validate(graph)
    fast = plan(graph, weights, devices=4, link=RankLink(300e9, 1e-6))
    slow = plan(graph, weights, devices=4, link=RankLink(1e8, 1e-3))
    assert fast.predicted and slow.predicted and fast.predicted.time_s < slow.predicted.time_s


def test_devices_that_cannot_be_shared_are_refused() -> None:
    net = build([[-1], [0]], [1.0, 1.0])
    with pytest.raises(PlanError, match="5 devices cannot share 2 units and a batch of 1"):
        plan(net.graph, net.weights, devices=5)


def test_closed_forms_and_simulator_agree_on_equal_stages() -> None:
    net = build([[-1], *([i] for i in range(3))], [1.0] * 4)
    stages = split(net.graph, net.weights, stages=4).stages
    free = RankLink(bytes_per_s=1e30, latency_s=0.0)
    for pipeline in (
        Pipeline("model_parallel", 1, 3),
        Pipeline("gpipe", 6),
        Pipeline("1f1b", 6),
        Pipeline("gems", 1, 4),
    ):
        assert simulate_candidate(stages, pipeline, 1, free).time_s == pytest.approx(pipeline.step_s(stages, free))


def test_a_unet_is_folded_so_that_skips_stay_on_their_rank() -> None:
    with torch.device("meta"):
        model = models.UNet()
    graph = outcore.capture(model, torch.empty(1, 3, 128, 128, device="meta"))
    weights = weights_from_shapes(graph)
    fold = split_vertically(graph, weights)
    assert fold.placement == (0, 1, 2, 3, 4, 3, 2, 1, 0)
    assert fold.names[1] == ("encoder2",) and fold.names[-2] == ("decoder2",)
    for edge in fold.partition.stages.edges:
        far = [t for t in edge.targets if t > edge.source + 1]
        assert all(fold.placement[t] == fold.placement[edge.source] for t in far)
    three = split_vertically(graph, weights, ranks=3)
    assert max(three.placement) == 2 and len(three.placement) == 5
    rows = split(graph, weights, stages=3, balance="memory")
    print("fold", max(three.peak_bytes), "rows", max(rows.peak_bytes))
    for schedule in ("model_parallel", "gpipe", "1f1b"):
        made = Plan(graph.fingerprint, three.names, schedule, 1, placement=three.placement)  # type: ignore[arg-type]
        made.validate(graph, ranks=3)
        timeline = predict_timeline(made, graph, weights, Links())
        assert timeline.peak_bytes == three.peak_bytes and len(timeline) == 3
    with pytest.raises(PlanError, match="gems places its two replicas itself"):
        split_vertically(graph, weights, pipeline=Pipeline("gems", 1, 2))
    with pytest.raises(PlanError, match="folds onto 2 to 5 ranks, not 6"):
        split_vertically(graph, weights, ranks=6)


def test_candidates_have_every_divisor_of_the_batch() -> None:
    found = [c.pipeline for c in candidates_for(100, 2, 300, None) if c.stages == 2]
    assert max(p.pieces for p in found) == 300
    assert Pipeline("gpipe", 5, 60) in found and Pipeline("gems", 6, 50) in found and Pipeline("1f1b", 150) in found
    assert all(p.micro_batches > 1 for p in found if p.schedule == "gpipe")
    assert len(set(found)) == len(found)


def test_gpipe_in_several_batches_holds_less() -> None:
    graph = chain()
    weights = weights_from_shapes(graph)
    whole = plan(graph, weights, devices=2, schedule="gpipe")
    assert whole.predicted
    cap = max(whole.predicted.peak_bytes) * 6 // 10
    tight = plan(graph, weights, devices=2, schedule="gpipe", memory_bytes=cap)
    assert tight.batches > 1 and tight.predicted and max(tight.predicted.peak_bytes) <= cap


def test_frozen_parameters_and_buffers_take_memory_but_have_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    graph = outcore.capture(model, torch.randn(4, 8))
    accounted = CallWeights.of(graph, account(graph, "cpu"))
    for weights in (accounted, weights_from_shapes(graph)):
        stages = split(graph, weights, stages=3).stages.stages
        assert [(s.parameter_bytes, s.gradient_bytes) for s in stages] == [(288, 0), (64 + 64 + 8, 64), (256, 256)]


def test_nothing_is_printed_while_solving(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        os.write(1, b"inside")
    os.write(1, b"afterwards")
    assert capfd.readouterr().out == "afterwards"


def test_a_fold_is_planned_within_its_budget() -> None:
    with torch.device("meta"):
        model = models.UNet()
    graph = outcore.capture(model, torch.empty(4, 3, 64, 64, device="meta"))
    weights = weights_from_shapes(graph)
    free = plan_vertically(graph, weights, ranks=3)
    assert free.predicted and free.ranks == 3 and free.micro_batches > 1
    peak = predict_timeline(free, graph, weights, Links()).peak_bytes
    assert peak == free.predicted.peak_bytes
    with pytest.raises(PlanError, match=r"cannot be met by a fold.*memory_bytes=\d+") as refusal:
        plan_vertically(graph, weights, ranks=3, memory_bytes=1000)
    smallest = int(re.search(r"memory_bytes=(\d+)", str(refusal.value)).group(1))  # type: ignore[union-attr]
    tight = plan_vertically(graph, weights, ranks=3, memory_bytes=smallest)
    assert tight.predicted and max(tight.predicted.peak_bytes) <= smallest
