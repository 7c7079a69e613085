"""A sum with the ReLU that writes over it as one operation: plain training bit for bit, under every policy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.op_fusion import add_relu
from outcore.memory.op_fusion.add_relu import as_summed, sums_of
from outcore.memory.saved_tensors import plan_call
from outcore.planner.memory.copy_schedule import OffloadTarget
from tests.memory.fused import managed
from tests.memory.oracle import policies

CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual: the sum in place or not, then ReLU in place or not."""

    def __init__(self, *, into: bool, over: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4)
        self.into, self.over = into, over

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        if self.into:
            y += x
        else:
            y = y + x
        return F.relu(y, inplace=self.over)


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [Block(into=into, over=over) for into in (True, False) for over in (True, False)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *blocks).double(), torch.randn(2, 3, 10, 10, dtype=torch.float64)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_relu, "_DEVICES", {"cpu"})


def agrees(model: nn.Module, plain: nn.Module, images: torch.Tensor) -> None:
    outputs = [m(images) for m in (model, plain)]
    for m, output in zip((model, plain), outputs, strict=True):
        m.zero_grad()
        output.square().mean().backward()
    assert torch.equal(*outputs)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name


def test_which_sums_and_what_they_save() -> None:
    model, images = made()
    graph = outcore.capture(model, (images,))
    found = sums_of(graph, model, CPU)
    assert found == {"1.add_()#0": "1.relu()#0", "3.add()#0": "3.relu()#0"}
    assert not sums_of(graph, model, torch.device("cuda"))
    costs = outcore.measure(graph, runs=2)
    less = as_summed(costs, found).calls["1.relu()#0"]
    assert less.forward is not None and less.forward.median_s == 0 and less.saved == costs.calls["1.relu()#0"].saved


def test_values_that_lie_differently_or_are_seen_in_between_are_left_alone() -> None:
    class Others(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            apart = F.relu(x.tanh() + y.tanh().transpose(2, 3), inplace=True)
            doubled = x.sin()
            doubled = F.relu(doubled + doubled, inplace=True)
            seen = x.cos() + y.cos()
            again = seen * 2
            return apart, doubled, F.relu(seen, inplace=True), again, F.relu(x.exp() + 1, inplace=True)

    shapes = [torch.randn(1, 2, 3, 3, requires_grad=True) for _ in range(2)]
    graph = outcore.capture(Others(), tuple(shapes))
    assert sums_of(graph, Others(), CPU) == {}


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload", "encode", "mixture"])
def test_under_every_policy(mode: str) -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    plan = managed(model, images)
    if mode != "keep":
        chosen = policies(plan.keeping, mode)
        if mode == "offload":  # also what is too small to be worth it
            chosen = {b.name: mode for b in plan.keeping.buffers.values() if b.kind == "value" and b.savers}
        assert managed(model, images, plan=chosen).policy or mode in ("encode", "mixture")
    for _ in range(2):
        agrees(model, plain, images)


def test_what_leaves_is_not_held_by_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward there is as much with fused sums as without.

    Where a copy has to be over, and its memory is dropped, follows from times: those given, not a busy machine's.
    """
    monkeypatch.setattr(plan_call, "tier_below", lambda *_, **__: OffloadTarget(1e12, 1e12))
    held = []
    for devices, leaves in (({"cpu"}, True), (set(), True), (set(), False)):
        monkeypatch.setattr(add_relu, "_DEVICES", devices)
        model, images = made()
        costs = by_bytes(account(outcore.capture(model, (images,))), 1e9)
        buffers = managed(model, images, costs=costs).keeping.buffers.values()
        policy = {b.name: "offload" for b in buffers if {"1.relu()#0", "3.relu()#0"}.intersection(b.writers)}
        assert len(policy) == 2
        managed(model, images, costs=costs, plan=policy if leaves else {})
        model(images)
        with LiveBytes([*model.parameters(), images]) as living:
            output = model(images)
            held.append(living.live)
        del output
    assert held[0] == held[1] == held[2] - 2 * images[:, :1, 1:-1, 1:-1].numel() * 4 * images.element_size()


def test_gradients_of_gradients() -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    managed(model, images)
    found = []
    for m in (model, plain):
        inner = torch.autograd.grad(m(images).square().sum(), list(m.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in inner), list(m.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
