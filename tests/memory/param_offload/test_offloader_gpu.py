"""State below a GPU: pinned homes, copies on streams of their own, the weights of plain training."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from tests.memory.param_offload.test_offloader import ADAM, OPTIMIZERS
from tests.memory.param_offload.test_offloader_loops import keeper
from tests.memory.param_offload.test_offloader_parameters import tangled

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    head = [
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(2048, 4096),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(4096, 4),
    ]
    return nn.Sequential(*layers, *head).cuda()


def batch(i: int = 0) -> torch.Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(i)).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> None:
    torch.manual_seed(5)
    for i in range(steps):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()


WAYS: dict[str, dict[str, Any]] = {
    "parameters": {"parameters": "offload"},
    "parameters, in backward": {"parameters": "offload", "update": "backward"},
    "optimizer": {"optimizer": "offload"},
    "optimizer, in backward": {"optimizer": "offload", "update": "backward"},
    "both": {"parameters": "offload", "optimizer": "offload", "flat_buffer_bytes": 2**16},
    "both, in backward": {"parameters": "offload", "optimizer": "offload", "update": "backward"},
    "window": {"parameters": "offload", "stage_bytes": 40 * 2**20, "flat_buffer_bytes": 2**16},
    "window, in backward": {"parameters": "offload", "stage_bytes": 40 * 2**20, "update": "backward"},
    "all": {"parameters": "offload", "optimizer": "offload", "gradients": "offload", "stage_bytes": 40 * 2**20},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_a_gpu_with_state_on_the_host_is_plain_training(name: str, way: str) -> None:
    model, plain = network(), network()
    optimizer, twin = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e12)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, state=WAYS[way], quiet=True)
    train(model, optimizer), train(plain, twin)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()), plain.eval()(batch()))
    ours = model.state_dict()
    differing = [n for n, t in plain.state_dict().items() if not torch.equal(ours[n].cuda(), t)]
    assert not differing
    if "stage_bytes" in WAYS[way]:
        assert 0 < keeper(model).stats.peak_bytes <= WAYS[way]["stage_bytes"]
    outcore.release(model)
    assert all(p.is_cuda for p in model.parameters())
    train(model.train(), optimizer, 3), train(plain.train(), twin, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("way", ["both", "both, in backward", "all"])
def test_policies_for_values_and_for_state_together(way: str) -> None:
    model, plain = tangled().cuda(), tangled().cuda()
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).cuda()
    optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e12)
    outcore.within(model, (x,), memory=None, costs=costs, quiet=True)
    kept = outcore.memory_plan(model).keeping
    plan = {b.name: c[0] for b in kept.buffers.values() if (c := kept.choices(b))}
    state = {**WAYS[way], "flat_buffer_bytes": 2048}
    if "stage_bytes" in state:
        state["stage_bytes"] = 26000
    outcore.within(model, (x,), memory=None, costs=costs, optimizer=optimizer, plan=plan, state=state, quiet=True)
    for net, opt in ((model, optimizer), (plain, twin)):
        for _ in range(5):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    ours = model.state_dict()
    assert not [n for n, t in plain.state_dict().items() if not torch.equal(ours[n].cuda(), t)]


def test_a_copy_of_a_model_whose_parameters_are_away_computes_on_the_device() -> None:
    model = network()
    optimizer = ADAM(model.parameters())
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e12)
    outcore.within(
        model, (batch(),), memory=None, costs=costs, optimizer=optimizer, state=WAYS["parameters"], quiet=True
    )
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    assert not next(model.parameters()).is_cuda
    with torch.no_grad():
        assert torch.equal(twin.eval()(batch()), model.eval()(batch()))
    assert next(twin.parameters()).is_cuda


def test_another_batch_size_is_recorded_while_parameters_are_away() -> None:
    for way in ("parameters", "window"):
        model, plain = network(), network()
        optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
        costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e12)
        outcore.within(model, (batch(),), memory=None, costs=costs, optimizer=optimizer, state=WAYS[way], quiet=True)
        for net, opt in ((model, optimizer), (plain, twin)):
            torch.manual_seed(3)
            for size in (8, 5, 8):
                opt.zero_grad()
                net(batch()[:size]).square().mean().backward()
                opt.step()
        ours = model.state_dict()
        assert not [n for n, t in plain.state_dict().items() if not torch.equal(ours[n].cuda(), t)]


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(0.5), lambda p: p.detach().add_(1e-6)])
def test_what_is_written_while_parameters_are_coming_back_is_kept(write: Any) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.Linear(8192, 4)).cuda()

    model, plain = wide(), wide()
    images = torch.randn(4, 8192, device="cuda")
    optimizer, twin = (torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, plain))
    costs = by_bytes(account(outcore.capture(model, (images,))), 1e12)
    state = {"parameters": "offload", "update": "backward"}
    outcore.within(model, (images,), memory=None, optimizer=optimizer, costs=costs, state=state, quiet=True)
    late = 0
    for i in range(8):
        for net, opt in ((model, optimizer), (plain, twin)):
            opt.zero_grad()
            net(images).square().mean().backward()
            opt.step()
            late += len(keeper(model).in_flight.flat_buffers) if net is model else 0
            for p in net.parameters() if i > 3 else ():
                write(p)
    assert late > 0 and all(p.isfinite().all() for p in plain.parameters())
    writebacks = keeper(model).writebacks
    round_trips = [writeback.round_trip for writeback in (*writebacks.after_update.values(), writebacks.delayed)]
    assert len(round_trips) > 1 and all(round_trip.graph is not None for round_trip in round_trips)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
