"""Real networks cut into 2, 4 and 8 stages by every balance: valid, and how even they are is printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore import models
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner import CallWeights, Partition, Pipeline, plan, split
from tests.foreign.sample import one_in
from tests.planner.nets import build
from tests.planner.shape_weights import weights_from_shapes

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet110v2": (models.ResNet110V2, (8, 3, 256, 256)),
    "amoebanet-d": (lambda: models.AmoebaNetD(), (8, 3, 224, 224)),
    "unet": (models.UNet, (2, 3, 256, 256)),
    "relaynet": (models.ReLayNet, (2, 1, 256, 256)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 12),
        (8, 128, 256),
    ),
}


@cache
def network(name: str) -> tuple[Graph, CallWeights]:
    build, shape = NETWORKS[name]
    with torch.device("meta"):
        model = build()
    graph = outcore.capture(model, torch.empty(shape, device="meta"))
    return graph, weights_from_shapes(graph)


@pytest.mark.parametrize(("name", "stages"), one_in(3, product(NETWORKS, [2, 4, 8])))
def test_networks_are_cut_by_every_balance(name: str, stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    graph, weights = network(name)
    pipeline = Pipeline("1f1b", 8)
    found: dict[str, Partition] = {}
    for balance in ("compute", "memory", "search"):
        options: dict[str, Any] = {"stages": stages, "balance": balance, "pipeline": pipeline, "fraction": 1 / 8}
        found[balance] = split(graph, weights, **options)
        cut = found[balance]
        assert sorted(c for s in cut.stages.stages for c in s.calls) == sorted(graph.calls)
        placed = {c: k for k, s in enumerate(cut.stages.stages) for c in s.calls}
        for call in graph.calls.values():
            for value in call.inputs:
                producer = graph.values[value].producer
                assert producer is None or placed[producer] <= placed[call.name]
        with capsys.disabled():
            print(
                f"\n{name} {stages} {balance}: time {cut.time_imbalance:.3f}, bytes {cut.memory_imbalance:.3f}, "
                f"peak {max(cut.peak_bytes) / 2**20:,.0f} MiB, {cut.how}",
                end="",
            )
    assert found["compute"].busiest_s <= min(f.busiest_s for f in found.values())
    assert max(found["memory"].peak_bytes) <= min(max(f.peak_bytes) for f in found.values())


def test_pairs_under_gems_hold_less_than_equal_single_stages() -> None:
    gems = Pipeline("gems", 1, 2)
    for name in ("resnet110v2", "unet"):
        graph, weights = network(name)
        single = split(graph, weights, stages=4, balance="memory", pipeline=Pipeline("model_parallel"))
        paired = split(graph, weights, stages=4, balance="memory", pipeline=gems)
        print(name, max(gems.peak_bytes(single.stages)), max(paired.peak_bytes))
        assert max(paired.peak_bytes) <= max(gems.peak_bytes(single.stages))


@pytest.mark.parametrize("granularity", ["block", 2, "layer"])
def test_granularity_keeps_blocks_whole(granularity: Any) -> None:
    graph, weights = network("unet")
    cut = split(graph, weights, stages=3, granularity=granularity)
    depth = {"block": 1, 2: 2, "layer": 9}[granularity]
    whole = set()
    for box in graph.view(None if depth == 9 else depth).boxes.values():
        stages = {k for k, s in enumerate(cut.stages.stages) for c in s.calls if c in box.calls}
        whole.add(len(stages))
    assert whole == {1}


def test_pool_indices_skip_far_and_have_no_gradient() -> None:
    graph, weights = network("relaynet")
    cut = split(graph, weights, stages=4, granularity="block")
    integer = [e for e in cut.stages.edges if not e.has_gradient]
    assert integer and all(graph.values[e.value].dtype == "int64" for e in integer)
    assert max(t - e.source for e in integer for t in e.targets) > 1


@pytest.mark.parametrize("name", ["resnet110v2", "unet"])
def test_planning_is_quick_and_the_plan_fits_its_graph(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    graph, weights = network(name)
    begin = time.perf_counter()
    free = plan(graph, weights, devices=2)
    cap = max(free.predicted.peak_bytes) * 3 // 4 if free.predicted else 0
    tight = plan(graph, weights, devices=2, memory_bytes=cap)
    with capsys.disabled():
        print(f"\n{name}: {len(graph.calls)} calls planned twice in {time.perf_counter() - begin:.1f} s", end="")
    for found in (free, tight):
        found.validate(graph, ranks=2)
    assert free.predicted and tight.predicted
    assert max(tight.predicted.peak_bytes) <= cap
    assert tight.predicted.time_s >= free.predicted.time_s * (1 - 1e-9)
    assert any("runner-up" in line for line in free.why)


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("name", ["torchvision/inception_v3", "torchvision/densenet121", "monai/BasicUNetPlusPlus"])
def test_foreign_networks_are_cut_evenly(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.foreign.zoo import by_name

    foreign = by_name(name)
    args, kwargs = foreign.inputs(2)
    graph = outcore.capture(foreign.build().train(), args, kwargs)
    weights = weights_from_shapes(graph)
    for stages in (2, 4, 8):
        for balance in ("compute", "memory"):
            options: dict[str, Any] = {"stages": stages, "balance": balance}
            cut = split(graph, weights, **options)
            with capsys.disabled():
                print(
                    f"\n{name} {stages} {balance}: time {cut.time_imbalance:.3f}, bytes {cut.memory_imbalance:.3f}",
                    end="",
                )
            assert cut.time_imbalance < 1.1 or balance == "memory"


@pytest.mark.parametrize("devices", [8, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [*one_in(2, [None, 0.5]), pytest.param(0.01, marks=pytest.mark.slow)])
def test_fifteen_hundred_calls_are_planned_in_seconds(
    devices: int, share: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a budget, with one that can be met and with one that cannot: what it took is printed."""
    inputs = [[-1], [0], *([i - 1, i - 2] for i in range(2, 1500))]
    times, sizes = [1e-4 * (1 + i % 7) for i in range(1500)], [1000 + i % 13 for i in range(1500)]
    net = build(inputs, times, sizes=sizes, keeps=[{i} for i in range(1500)], batch=128)
    cap = None if share is None else int(share * sum(sizes) / devices)
    begin = time.process_time()
    try:
        made = plan(net.graph, net.weights, devices=devices, memory_bytes=cap)
    except PlanError as refusal:
        assert share is not None and share < 0.5 and "the smallest that can is" in str(refusal)
    else:
        made.validate(net.graph, ranks=devices)
        assert made.predicted and (cap is None or max(made.predicted.peak_bytes) <= cap)
    with capsys.disabled():
        print(f"\n1,500 calls, {devices} devices, budget {share}: {time.process_time() - begin:.1f} s", end="")
