"""On a GPU: graphs, streams and the one-kernel update give what plain PyTorch gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import outcore
from outcore.fusion import RunMode, choose, forecast
from tests.fusion.networks import Bert, LstmTagger
from tests.fusion.serial import distance, train_serially

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WAYS = {
    "fused, eager": RunMode(3),
    "fused, graphed": RunMode(3, graphed=True),
    "streams": RunMode(1, graphed=True, parallel=True),
    "streams in one graph": RunMode(1, graphed=True, parallel=True, joined=True),
    "sub-arrays": RunMode(2, graphed=True),
    "channels last": RunMode(3, graphed=True, channels_last=True),
}


def _cnn(i: int) -> nn.Module:
    torch.manual_seed(i)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, groups=16, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def _bert(i: int) -> nn.Module:
    torch.manual_seed(i)
    return Bert(50, 16, 2, 2, dropout=0.0)


def _lstm(i: int) -> nn.Module:
    torch.manual_seed(i)
    return LstmTagger(50, 8, 6, 5)


def _images() -> tuple[Any, Any]:
    return torch.randn(4, 3, 8, 8), torch.randint(5, (4,))


def _tokens() -> tuple[Any, Any]:
    return torch.randint(50, (2, 6)), torch.randint(5, (2, 6))


NETS = {"cnn": (_cnn, _images), "bert": (_bert, _tokens), "lstm": (_lstm, _tokens)}


def _adam(params: Any, i: int) -> optim.Optimizer:
    return optim.AdamW(params, 1e-3 * (i + 1), betas=(0.9 - 0.1 * i, 0.99), eps=1e-4, weight_decay=0.1 * i)


def _sgd(params: Any, i: int) -> optim.Optimizer:
    return optim.SGD(params, 1e-2 * (i + 1), momentum=0.9 - 0.2 * i, weight_decay=0.1 * i, nesterov=True)


@pytest.fixture(autouse=True)
def plain_precision() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_serial_training(net: str, way: str, dtype: torch.dtype) -> None:
    build, batch = NETS[net]
    models = [build(i).to("cuda", dtype) for i in range(3)]
    twins = [build(i).to("cuda", dtype) for i in range(3)]
    torch.manual_seed(9)
    batches = [tuple(t.cuda().to(dtype) if t.is_floating_point() else t.cuda() for t in batch()) for _ in range(8)]
    optimizer = _adam if net != "lstm" else _sgd
    array = outcore.fuse(
        models,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda o, i: optim.lr_scheduler.StepLR(o, 2 + i, 0.5),
        clip=[1.0, 0.1, 10.0],
        way=WAYS[way],
    )
    losses = []
    for x, y in batches:
        losses.append(array.step(x, y))
        array.schedule()
    assert array.runner.refused is None, array.runner.refused
    assert array.way == WAYS[way], array.notes
    for i, twin in enumerate(twins):
        own = optimizer(twin.parameters(), i)
        expected = train_serially(
            twin,
            batches,
            F.cross_entropy,
            own,
            schedulers=[optim.lr_scheduler.StepLR(own, 2 + i, 0.5)],
            clip=[1.0, 0.1, 10.0][i],
        )
        tolerance = 1e-10 if dtype == torch.float64 else 2e-4
        assert max(abs(float(a[i]) - b) for a, b in zip(losses, expected, strict=True)) < tolerance * 10
        apart = distance(dict(twin.state_dict()), array[i].state_dict())
        assert apart < tolerance, f"member {i} differs by {apart:.1e}"


@pytest.mark.parametrize("way", ["fused, graphed", "streams", "channels last"])
def test_a_sweep_in_graphs_evaluates_and_refills_like_serial_training(way: str) -> None:
    """Training and evaluation take turns; a slot is refilled without a new capture where members are fused."""
    models, new = [_cnn(i).cuda().double() for i in range(3)], _cnn(40).cuda().double()
    twins = [*copy.deepcopy(models), copy.deepcopy(new)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_adam, way=WAYS[way])
    torch.manual_seed(1)
    batches = [tuple(t.cuda().double() if t.is_floating_point() else t.cuda() for t in _images()) for _ in range(12)]
    *batches, one, other = batches
    found = []
    for n, batch in enumerate(batches):
        if n == 5:
            before = dict(array.runner._captured)
            array.refill(0, new)
            after = set(array.runner._captured.values())
            assert len(before) == 2 and after == (set() if way == "streams" else set(before.values()))
        array.step(*batch)
        found.append([array.evaluate(*judged).tolist() for judged in (one, other)])
    assert len(array.runner._captured) == 2 and array.runner.refused is None
    for slot, twin, first, last in ((0, 0, 0, 5), (1, 1, 0, 10), (2, 2, 0, 10), (0, 3, 5, 10)):
        own = _adam(twins[twin].parameters(), slot)
        for n in range(first, last):
            train_serially(twins[twin], batches[n : n + 1], F.cross_entropy, own)
            twins[twin].eval()
            with torch.no_grad():
                expected = [float(F.cross_entropy(twins[twin](x), y)) for x, y in (one, other)]
            twins[twin].train()
            assert max(abs(found[n][k][slot] - expected[k]) for k in (0, 1)) < 1e-9, f"member {twin}, step {n}"


@pytest.mark.parametrize("way", ["fused, graphed", "streams", "channels last"])
def test_an_array_in_graphs_that_keeps_some_goes_on_like_serial_training(way: str) -> None:
    models = [_cnn(i).cuda().double() for i in range(3)]
    twins = copy.deepcopy(models)
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_adam, way=WAYS[way])
    torch.manual_seed(1)
    batches = [tuple(t.cuda().double() if t.is_floating_point() else t.cuda() for t in _images()) for _ in range(12)]
    for n, batch in enumerate(batches):
        if n == 5:
            array.keep([2, 1])
        if n == 10:
            array.keep([1])
        array.step(*batch)
    assert array.runner.refused is None and len(array) == 1
    train_serially(twins[1], batches, F.cross_entropy, _adam(twins[1].parameters(), 1))
    assert distance(dict(twins[1].state_dict()), array[0].state_dict()) < 1e-10


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD])
def test_groups_of_parameters_are_stepped_by_one_kernel_each_with_state_for_no_others(kind: type[optim.Adam]) -> None:
    def optimizer(params: Any, i: int) -> optim.Optimizer:
        first, *others = params
        more = {"momentum": 0.9} if kind is optim.SGD else {"eps": 1e-4}  # a gradient that is rounding moves nothing
        return kind([{"params": [first], "weight_decay": 0.1}, {"params": others}], lr=1e-3 * (i + 1), **more)

    models = [_cnn(i).cuda() for i in range(3)]
    twin = copy.deepcopy(models[2])
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=optimizer, way=RunMode(3, graphed=True))
    torch.manual_seed(1)
    batches = [tuple(t.cuda() for t in _images()) for _ in range(8)]
    for batch in batches:
        array.step(*batch)
    train_serially(twin, batches, F.cross_entropy, optimizer(twin.parameters(), 2))
    assert distance(dict(twin.state_dict()), array[2].state_dict()) < 1e-4
    bundles = [bundle.fast for group in array.groups for bundle in group.steppers["loss"].bundles]
    assert len(bundles) == 2 and all(bundles)
    counted = sum(p.numel() for p in twin.parameters()) * 3
    assert all(sum(b.state[k].numel() for b in bundles) == counted for k in range(len(bundles[0].state)))


def test_a_diverged_member_does_not_touch_the_others_in_a_graph() -> None:
    models = [_cnn(i).cuda() for i in range(3)]
    twin = copy.deepcopy(models[2])
    array = outcore.fuse(
        models,
        loss=F.cross_entropy,
        optimizer=lambda p, i: optim.SGD(p, float("inf") if i == 1 else 1e-2),
        way=RunMode(3, graphed=True),
    )
    torch.manual_seed(1)
    batches = [tuple(t.cuda() for t in _images()) for _ in range(8)]
    for x, y in batches:
        array.step(x, y)
    assert array.status == ["training", "diverged", "training"]
    train_serially(twin, batches, F.cross_entropy, optim.SGD(twin.parameters(), 1e-2))
    assert distance(dict(twin.state_dict()), array[2].state_dict()) < 1e-4


@pytest.mark.parametrize("way", ["fused, graphed", "streams"])
def test_half_precision_follows_serial_training(way: str) -> None:
    models = [_bert(i).cuda() for i in range(3)]
    twin = copy.deepcopy(models[1])
    array = outcore.fuse(
        models, loss=F.cross_entropy, optimizer=_sgd, autocast=torch.bfloat16, way=WAYS[way], check=False
    )
    torch.manual_seed(1)
    x, y = (t.cuda() for t in _tokens())
    own = _sgd(twin.parameters(), 1)
    for _ in range(6):
        found = array.step(x, y)[1]
        own.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            expected = F.cross_entropy(twin(x), y)
        expected.backward()
        own.step()
        assert abs(float(found) - float(expected.detach())) < 0.1


def test_dropout_in_a_graph_draws_anew_in_every_step() -> None:
    models = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5 * i)).cuda() for i in range(2)]
    array = outcore.fuse(
        models,
        loss=lambda out, _: out.square().mean(),
        optimizer=lambda p: optim.SGD(p, 0.0),
        way=RunMode(2, graphed=True),
    )
    x = torch.randn(8, 64).cuda()
    seen = torch.stack([array.step(x, x) for _ in range(8)])
    assert len(set(seen[:, 0].tolist())) == 1
    assert len(set(seen[:, 1].tolist())) == 8


def test_the_choice_is_made_and_memory_is_predicted() -> None:
    models = [_cnn(i).cuda() for i in range(6)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_adam3)
    x, y = torch.randn(64, 3, 32, 32).cuda(), torch.randint(5, (64,)).cuda()
    made = choose(array, x, y, seconds=0.02)
    assert made.way == array.way and len(made.trials) == 4
    assert array.step(x, y).shape == (6,)
    assert forecast(array, x, y).peak_bytes() > 0


def _adam3(params: Any, i: int) -> optim.Optimizer:
    return optim.Adam(params, 1e-3)
