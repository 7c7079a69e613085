"""A norm that takes a convolution's bias and a ReLU along: the same training as plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import outcore
from outcore.fusion import RunMode, forecast
from outcore.fusion.program import batch_norm_chain, replay
from outcore.fusion.program.batch_norm_chain import BatchNormChain
from outcore.fusion.rules import batch_norm_relu
from outcore.fusion.rules.norm_max import norm_max
from tests.fusion.serial import distance, train_serially


class _Net(nn.Module):
    """Norms after convolutions with and without bias, with a ReLU or without, and one whose input others read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2, self.relu = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.third, self.norm3 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, momentum=0.3)
        self.shared, self.norm4 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, track_running_stats=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.first(x)))
        x = x + self.relu(self.norm2(self.second(x)))
        y = self.norm3(self.third(x))
        z = self.shared(F.relu(y) + y)
        out: torch.Tensor = self.last((F.relu(self.norm4(z)) + z).mean((2, 3)))
        return out


class _Points(nn.Module):
    """Two descriptions of a cloud by its largest values, with ReLU and without."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.norm1 = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)
        self.two, self.norm2 = nn.Conv1d(3, 8, 1, bias=False), nn.BatchNorm1d(8, momentum=0.3)
        self.last = nn.Linear(16, 5)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight)  # where it is negative, the smallest becomes the largest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.max(F.relu(self.norm1(self.one(x))), 2)[0]
        b = self.norm2(self.two(x)).max(dim=-1).values
        out: torch.Tensor = self.last(torch.cat([a, b], 1))
        return out


class _Places(_Points):
    """Asks where the largest are, so that they must be those that torch finds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, where = torch.max(F.relu(self.norm1(self.one(x))), 2)
        out: torch.Tensor = self.last(torch.cat([values, where.to(values.dtype) / x.shape[2]], 1))
        return out


IMAGES, CLOUDS = (4, 3, 6, 6), (4, 3, 20)


def _sgd(params: Any, i: int) -> optim.Optimizer:
    return optim.SGD(params, 1e-2 * (i + 1), momentum=0.9, weight_decay=0.1)


def _trains_as_plain(
    build: Callable[[int], nn.Module], shape: tuple[int, ...], device: str, way: RunMode, dtype: torch.dtype
) -> outcore.fusion.FusedArray:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    models = [build(i).to(device, dtype) for i in range(3)]
    twins = copy.deepcopy(models)
    torch.manual_seed(5)
    batches = [(torch.randn(shape, dtype=dtype).to(device), torch.randint(5, (4,)).to(device)) for _ in range(6)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd, way=way)
    for batch in batches:
        array.step(*batch)
    assert not array.notes
    for i, twin in enumerate(twins):
        train_serially(twin, batches, F.cross_entropy, _sgd(twin.parameters(), i))
        apart = distance(dict(twin.state_dict()), array[i].state_dict())
        assert apart < tolerance, f"member {i} differs by {apart:.1e}"
    return array


def _chains(array: outcore.fusion.FusedArray) -> set[BatchNormChain]:
    (found,) = array._recordings.programs.values()
    return set(found.chains.values())


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chains run as one on a CPU too, by torch's own norm."""
    monkeypatch.setattr(replay, "pays", lambda m, s, _: batch_norm_chain.pays(m, s, torch.device("cuda")))
    yield


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("channels_last", [False, True])
def test_members_with_chains_equal_their_serial_twins(channels_last: bool) -> None:
    array = _trains_as_plain(_Net, IMAGES, "cpu", RunMode(3, channels_last=channels_last), torch.float64)
    found = {c.path.removeprefix("model."): (c.relu is not None, c.bias) for c in _chains(array)}
    assert found == {
        "norm1": (True, "model.first.bias"),
        "norm2": (True, "model.second.bias"),
        "norm3": (False, None),
        "norm4": (True, None),
    }


@pytest.mark.usefixtures("as_on_a_gpu")
def test_only_the_largest_values_of_a_norm_are_made_where_nothing_else_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_norm_relu, "_LARGE", 0)
    monkeypatch.setattr(batch_norm_relu, "_suits", lambda x: True)
    made: list[bool] = []
    monkeypatch.setattr(batch_norm_relu, "norm_max", lambda *a, **k: made.append(True) or norm_max(*a, **k))
    array = _trains_as_plain(_Points, CLOUDS, "cpu", RunMode(3), torch.float64)
    assert {c.path for c in _chains(array) if c.largest is not None} == {"model.norm1", "model.norm2"}
    assert len(made) == 2 * (6 + 1)  # two norms in six steps, and in the check before the first


@pytest.mark.usefixtures("as_on_a_gpu")
def test_where_the_largest_values_are_is_as_in_torch() -> None:
    assert not any(c.largest for c in _chains(_trains_as_plain(_Places, CLOUDS, "cpu", RunMode(3), torch.float64)))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_hook_on_a_norm_keeps_its_chain_apart() -> None:
    models = [_Net(i) for i in range(2)]
    seen: list[tuple[int, ...]] = []
    models[0].norm2.register_forward_hook(lambda _m, _x, out: seen.append(tuple(out.shape)))
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd, way=RunMode(2), check=False)
    batch = torch.randn(4, 3, 6, 6), torch.randint(5, (4,))
    array.step(*batch)
    seen.clear()  # of the recording too
    array.step(*batch)
    assert seen == [(4, 8, 6, 6)]


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.float64, torch.float32)])
@pytest.mark.parametrize("net", ["images", "images, channels last", "clouds"])
def test_members_with_chains_equal_their_serial_twins_on_a_gpu(
    net: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm_relu, "_LARGE", 0)
    build, shape = (_Points, CLOUDS) if net == "clouds" else (_Net, IMAGES)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        way = RunMode(3, graphed=True, channels_last="last" in net)
        array = _trains_as_plain(build, shape, "cuda", way, dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert array.runner.refused is None
    x, y = torch.randn(shape, dtype=dtype).cuda(), torch.randint(5, (4,)).cuda()
    assert forecast(array, x, y).peak_bytes() > 0


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["positions first", "channels last", "long"])
def test_one_pass_gives_what_torch_gives(
    layout: str, biased: bool, relu: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm_relu, "_LARGE", 0)
    from outcore.fusion.program.call import FusedCall
    from outcore.fusion.program.values import Stacked
    from outcore.fusion.rules.batch_norm_relu import norm_in_one_pass

    torch.manual_seed(1)
    members, batch, channels = 3, 5, 70
    shape = {"positions first": (33,), "channels last": (7, 9), "long": (300,)}[layout]
    x = torch.randn(batch, *shape, members, channels, device="cuda").movedim((-2, -1), (0, 2)).to(dtype)
    if layout == "long":
        x = x.contiguous()
    x = (x * 3 + 7).detach().requires_grad_()
    modules = [nn.BatchNorm2d(channels).cuda() for _ in range(members)]
    state = {n: torch.stack([m.state_dict()[n] for m in modules]) for n in modules[0].state_dict()}
    for name in ("weight", "bias"):
        state[name] = torch.randn_like(state[name]).requires_grad_()
    before = torch.randn(members, channels, device="cuda", requires_grad=True) if biased else None
    stacked: dict[str, Any] = {n: Stacked(t) for n, t in state.items()}
    call = FusedCall("norm", members, 0, nn.BatchNorm2d, (Stacked(x),), {}, tuple(modules), stacked)
    found = norm_in_one_pass(call, None if before is None else Stacked(before), relu=relu)
    assert isinstance(found, Stacked)
    made = found.tensor
    onto = torch.randn_like(made)
    made.backward(onto)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for b, module in enumerate(modules):
        own = x[b].detach().double().requires_grad_()
        module.double().load_state_dict({n: t[b] for n, t in state.items()} | _fresh(channels))
        whole = own if before is None else own + before[b].detach().double().view(-1, *[1] * len(shape))
        mean, var = module.running_mean, module.running_var
        expected = F.batch_norm(whole, mean, var, module.weight, module.bias, True, 0.1, 1e-5)
        expected = expected.relu() if relu else expected
        expected.backward(onto[b].double())
        torch.testing.assert_close(made[b].double(), expected, **close)
        assert x.grad is not None and own.grad is not None
        torch.testing.assert_close(x.grad[b].double(), own.grad, **close)
        for name, own_one in (("weight", module.weight), ("bias", module.bias)):
            grad = state[name].grad
            assert grad is not None and own_one.grad is not None
            torch.testing.assert_close(grad[b].double(), own_one.grad, rtol=close["rtol"], atol=30 * close["atol"])
        torch.testing.assert_close(state["running_mean"][b].double(), mean, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(state["running_var"][b].double(), var, rtol=1e-3, atol=1e-3)
    assert state["num_batches_tracked"].tolist() == [1] * members
    if before is not None:
        assert before.grad is not None and not before.grad.any()


def _fresh(channels: int) -> dict[str, torch.Tensor]:
    return {"running_mean": torch.zeros(channels), "running_var": torch.ones(channels)}
