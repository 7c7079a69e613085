"""Forward and backward as CUDA graphs on a GPU: the same numbers, the budget kept, reserved memory counted."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.cuda_graphs.pool import give_back
from tests.memory.test_gpu import gradients, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def deterministic() -> object:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def graphed(model: nn.Module) -> object:
    """The graphs of a model, of whichever way of calling it has run."""
    entries = model.__dict__["forward"].admitted.values()
    return next((e.graphed for e in entries if e.graphed is not None and e.graphed.graphs is not None), None)


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("bf16", [False, True])
def test_every_policy_as_graphs(policy: str, bf16: bool) -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = network()
    if bf16:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    twin = copy.deepcopy(model)
    named = {"recompute": ("0.1#0:out", "5.1#0:out"), "offload": ("0.1#0:out", "5.0#0:out", "7.0#0:out"), "keep": ()}
    plan = dict.fromkeys(named[policy], policy)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        outcore.within(model, (images,), memory=None, plan=plan, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
    for _ in range(4):
        batch = torch.randn_like(images)
        want, got = gradients(twin, batch, bf16=bf16), gradients(model, batch, bf16=bf16)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        for net in (model, twin):
            torch.optim.SGD(net.parameters(), lr=0.01).step()
    assert graphed(model) is not None
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_what_is_reserved_is_within_the_budget(share: float) -> None:
    images = torch.randn(8, 3, 256, 256, device="cuda")
    model = network()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    outcore.within(model, (images,), memory=None, optimizer=optimizer, measure_s=2.0, quiet=True)
    plan = outcore.memory_plan(model)
    budget = int(share * plan.plain_bytes)
    outcore.within(
        model, (images,), memory=budget, optimizer=optimizer, costs=plan.keeping.costs, graphs=True, quiet=True
    )
    want = gradients(twin, images, bf16=False)
    del twin
    gc.collect()
    give_back()
    others = torch.cuda.memory_allocated() - sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images))
    got = gradients(model, images, bf16=False)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    del got
    give_back()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        gradients(model, images, bf16=False)
        optimizer.step()
    reserved = torch.cuda.max_memory_reserved()
    print(
        f"share {share}: reserved {reserved / 2**20:.0f}, others {others / 2**20:.0f}, budget {budget / 2**20:.0f} MiB"
    )
    assert graphed(model) is not None
    assert reserved - others <= budget


def test_the_workspace_of_a_product_is_not_there_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is the first of backward; what comes after it lies where its workspace was."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)).cuda()
    images, active, found = torch.randn(8, 3, 128, 128, device="cuda"), [], []
    for given_back in (True, False):
        if not given_back:
            monkeypatch.setattr("outcore.memory.cuda_graphs.step_graph.without_workspaces", lambda: None)
        net = copy.deepcopy(model)
        outcore.within(net, (images,), memory=None, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
        for _ in range(2):
            net.zero_grad()
            net(images).square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters()])
        active.append(graphed(net).bytes)
        del net
        gc.collect()
    assert active[0] < active[1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_are_accumulated_over_graphs() -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = network()
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
    for net in (model, twin):
        torch.manual_seed(1)
        for part in (images, images + 1, images - 1):
            net(part).square().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_a_smaller_last_batch_after_graphs() -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = network()
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
    for batch in (images, images[:3].clone(), images, images[:3].clone()):
        out = model(batch)  # the last one is still there when the next is made
        model.zero_grad()
        torch.manual_seed(3)
        out.square().sum().backward()
        want, got = gradients(twin, batch, bf16=False), gradients(model, batch, bf16=False)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_gradients_are_accumulated_over_batches_of_two_sizes() -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = network()
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
    for net in (model, twin):
        torch.manual_seed(1)
        for part in (images, images[:5].clone(), images + 1, images[:5] - 1):
            net(part).square().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


class Scaled(nn.Module):
    """Reads a number, a buffer and weights that the loop may exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.alpha = network(), 1.0
        self.register_buffer("gain", torch.ones((), device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.alpha * self.gain


def exchange_weights(model: Scaled) -> None:
    for p in model.parameters():
        p.data = p.data.clone() * 2


@pytest.mark.parametrize("which", ["attribute", "buffer", "weights", "every call"])
@pytest.mark.filterwarnings("ignore:.*changes in every call")
def test_graphs_are_recorded_again_when_what_they_read_changes(which: str) -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = Scaled()
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, optimizer=0.0, graphs=True, measure_s=1.0, quiet=True)
    for n in range(6):
        for net in (model, twin):
            if which == "every call":
                net.alpha = 1.0 + n
            elif n == 3:
                if which == "attribute":
                    net.alpha = 2.0
                elif which == "buffer":
                    net.gain = torch.full((), 3.0, device="cuda")
                else:
                    exchange_weights(net)
        batch = torch.randn_like(images)
        want, got = gradients(twin, batch, bf16=False), gradients(model, batch, bf16=False)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), n
    assert (graphed(model) is None) == (which == "every call")
