"""Scaled branches with the sums they end in as one operation: plain training up to rounding, under every policy."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion import add_relu, layer_norm_cast, layer_scale
from outcore.memory.op_fusion.layer_scale import scales_of
from outcore.memory.op_fusion.layer_scale_sum import LayerScaleSum
from outcore.memory.op_fusion.select import SelectedFusions
from tests.memory.fused import managed, replaced
from tests.memory.oracle import policies

CPU = torch.device("cpu")
RATE = 1e9


class Block(nn.Module):
    """As in torchvision: a parameter of every channel, a number of every image, a sum in place."""

    def __init__(self, drop: float, *, rows: bool = True) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.drop, self.rows = drop, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale * self.linear(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.drop:
            noise = torch.empty(x.shape[0] if self.rows else 1, 1, 1, 1, dtype=y.dtype).bernoulli_(1 - self.drop)
            y = y * noise.div_(1 - self.drop)
        y += x
        return y


class Last(nn.Module):
    """As elsewhere: the parameter goes along the last dimension, and then images are turned; the sum is a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gamma = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x.permute(0, 2, 3, 1)) * self.gamma).permute(0, 3, 1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.blocks = nn.Sequential(Block(0.0), Block(0.5), Last(), Block(0.4, rows=False))
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).contiguous(memory_format=torch.channels_last)
        return self.head(self.blocks(x))


SUMS = {"blocks.0.add_()#0", "blocks.1.add_()#0", "blocks.2.add()#0", "blocks.3.add_()#0"}


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(4, 3, 9, 7)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer_scale, layer_norm_cast):
        monkeypatch.setattr(module, "_DEVICES", {"cpu"})


def agrees(model: nn.Module, plain: nn.Module, images: torch.Tensor, bound: float, seed: int = 1) -> None:
    for m in (model, plain):
        m.zero_grad()
        torch.manual_seed(seed)
        m(images).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or (a.grad - b.grad).abs().max() <= bound * largest, name


def test_which_sums() -> None:
    model, images = made()
    graph = outcore.capture(model, (images,))
    found = scales_of(graph, model, account(graph), CPU)
    assert set(found) == SUMS
    assert [found[name].dim for name in sorted(SUMS)] == [1, 1, 1, 1]
    assert found["blocks.1.add_()#0"].products == ("blocks.1.mul()#0", "blocks.1.mul()#1")
    assert found["blocks.0.add_()#0"].noise is None
    assert not scales_of(graph, model, account(graph), torch.device("cuda"))


def test_what_somebody_else_sees_or_lies_apart_is_left_alone() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.one = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(1))
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seen = self.scale * self.inner(x)
            again = seen * 2
            first = x + seen
            written = self.inner(x)
            product = written * self.scale
            written += 1
            late = x + product
            single = x + self.one * self.inner(x)
            apart = x + self.scale.view(6, 1) * self.inner(x.transpose(1, 2).contiguous()).transpose(1, 2)
            double = x + self.inner(x) * self.scale.view(6)
            given = self.inner(x) * self.scale
            return first, again, late, single, apart, double, given, x + given

    model, images = Others(), torch.randn(3, 6, 6, requires_grad=True)
    graph = outcore.capture(model, (images,))
    assert scales_of(graph, model, account(graph), CPU) == {}
    block, photos = Block(0.0), torch.randn(2, 6, 5, 4).contiguous(memory_format=torch.channels_last)
    ends = nn.Sequential(nn.Conv2d(6, 6, 1), block)
    graph = outcore.capture(ends, (photos,))
    assert set(scales_of(graph, ends, account(graph), CPU)) == {"1.add_()#0"}
    graph = outcore.capture(ends, (photos.contiguous(),))  # the residual lies channel by channel
    assert scales_of(graph, ends, account(graph), CPU) == {}


@pytest.mark.parametrize("noise", [None, 1, 4])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
def test_the_operation(noise: int | None, kind: torch.dtype, apart: bool) -> None:
    torch.manual_seed(0)
    wide = torch.float64 if kind is torch.float64 else torch.float32
    x = torch.randn(4, 7, 5, 3, dtype=kind).contiguous(memory_format=torch.channels_last)
    residual = torch.randn(4, 7, 5, 3, dtype=wide)
    residual = residual if apart else residual.contiguous(memory_format=torch.channels_last)
    scale, g = torch.randn(7, 1, 1, dtype=wide), torch.randn(4, 7, 5, 3, dtype=wide)
    by = None if noise is None else torch.rand(noise, 1, 1, 1, dtype=wide)
    given = [t.clone().requires_grad_() for t in (x, scale, residual)]
    exact = [t.double().requires_grad_() for t in (x, scale, residual)]
    out = LayerScaleSum(1, wide)(given[0], given[1], by, given[2])
    assert isinstance(out, torch.Tensor)
    wanted = exact[2] + exact[0] * exact[1] * (1 if by is None else by.double())
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[kind]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5 if wide is torch.float32 else 1e-13)
    assert out.dtype is wide and (apart or out.stride() == x.stride())
    out.backward(g)
    wanted.backward(g.double())
    for a, b in zip(given, exact, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype is a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=bound, atol=bound * b.grad.abs().max().item())


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload", "mixture"])
def test_under_every_policy(mode: str) -> None:
    model, images = made()
    model, images = model.double(), images.double()
    plain = copy.deepcopy(model)
    plan = managed(model, images)
    if mode != "keep":
        chosen = policies(plan.keeping, mode)
        if mode == "offload":  # also what is too small to be worth it
            chosen = {b.name: mode for b in plan.keeping.buffers.values() if b.kind == "value" and b.savers}
        assert managed(model, images, plan=chosen).policy
    assert replaced(model) >= SUMS
    for seed in range(3):
        agrees(model, plain, images, 1e-10, seed)


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_under_autocast(mode: str) -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = managed(model, images)
        if mode != "keep":
            assert managed(model, images, plan=policies(plan.keeping, mode)).policy or mode == "offload"
        assert replaced(model) >= SUMS
        for seed in range(3):
            agrees(model, plain, images, 5e-2, seed)


class Convolved(nn.Module):
    """Begins with a convolution, which casts what the block before it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(6, 6, 3, padding=1, groups=6), Block(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block.linear(self.block.norm(self.conv(x).permute(0, 2, 3, 1)))
        y = self.block.scale * y.permute(0, 3, 1, 2)
        y += x
        return y


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload", "mixture"])
def test_a_copy_in_the_type_of_the_next_layer_is_written_along(mode: str) -> None:
    torch.manual_seed(0)
    model, images = nn.Sequential(*(Convolved() for _ in range(3))), torch.randn(2, 6, 9, 7)
    images = images.contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(model, (images,))
        rows = scales_of(graph, model, account(graph), CPU)
        assert [row.reader for row in rows.values()] == ["1.conv#0", "2.conv#0", ""]
        plan = managed(model, images)
        copies = [plan.keeping.buffers[row.copy] for row in rows.values() if row.copy]
        assert [(c.kind, c.bytes, c.writers[0]) for c in copies] == [
            ("value", 2 * images.numel(), f"{i}.add_()#0") for i in (0, 1)
        ]
        if mode != "keep":
            chosen = policies(plan.keeping, mode)
            if mode == "offload":
                chosen = {b.name: mode for b in plan.keeping.buffers.values() if b.kind == "value" and b.savers}
            document = managed(model, images, plan=chosen).document()
            managed(model, images, plan=document)
        model(images).float().square().mean().backward()
    exact(images.double()).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in exact.parameters() if p.grad is not None)
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 2e-2 * largest, name


def test_a_hook_before_the_next_layer_sees_the_sum() -> None:
    torch.manual_seed(0)
    model, images = nn.Sequential(Convolved(), Convolved()), torch.randn(2, 6, 9, 7)
    images = images.contiguous(memory_format=torch.channels_last)
    model[1].conv.register_forward_pre_hook(lambda *_: None)
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(model, (images,))
        assert [row.reader for row in scales_of(graph, model, account(graph), CPU).values()] == ["", ""]


def test_frozen_parameters() -> None:
    model, images = made()
    model, images = model.double(), images.double()
    model.blocks[1].scale.requires_grad_(False)  # type: ignore[index,union-attr]
    plain = copy.deepcopy(model)
    managed(model, images)
    agrees(model, plain, images, 1e-10)
    assert model.blocks[1].scale.grad is None and "blocks.1.add_()#0" in replaced(model)  # type: ignore[index,union-attr]


def test_memory_in_between_is_gone_and_the_sum_is_first_in_its_own() -> None:
    model, images = made()
    plan = managed(model, images)
    buffers = plan.keeping.buffers
    assert not {"blocks.1.mul()#0:out", "blocks.1.mul()#1:out"} & set(buffers)
    assert buffers["blocks.1.add_()#0:out"].writers[0] == "blocks.1.add_()#0"
    assert {"blocks.1.linear#0:out", "blocks.0.add_()#0:out"} <= set(buffers["blocks.1.add_()#0:out"].sources)
    graph = outcore.capture(outcore.release(model), (images,))
    assert plan.document().graph == graph.fingerprint


@pytest.mark.parametrize("half", [False, True])
def test_what_autograd_keeps_is_what_was_predicted(half: bool) -> None:
    model, images = made()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plan = managed(model, images)
        assert len(replaced(model)) == 4 + 6 + 3  # sums, products, layer norms
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def note(t: torch.Tensor) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = model(images)
        assert out.requires_grad
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    assert found == plan.keeping.costs.total().saved_bytes


def test_memory_that_has_a_policy_by_hand_stays() -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    managed(model, images, plan={"blocks.1.mul()#1:out": "recompute"})
    assert replaced(model) & SUMS == SUMS - {"blocks.1.add_()#0"}
    agrees(model, plain, images, 1e-4)


def test_a_plan_can_be_read_back_where_other_things_are_fused() -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    chosen = {"blocks.1.add_()#0:out": "recompute", "blocks.0.add_()#0:out": "offload"}
    document = managed(model, images, plan=chosen).document()
    assert set(document.policy) == set(chosen)
    managed(model, images, plan=document)
    agrees(model, plain, images, 1e-4)
    there = managed(model, images, plan=chosen, exact="bitwise").policy  # the memory that these values are in then
    assert set(there) >= {"blocks.1.mul()#1:out", "blocks.0.mul()#0:out"}
    agrees(model, plain, images, 0.0)


def test_a_sum_that_goes_with_its_relu_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rectified(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(super().forward(x))

    monkeypatch.setattr(add_relu, "_DEVICES", {"cpu"})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last), Rectified(0.0)).double()
    images = torch.randn(2, 3, 9, 7, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    managed(model, images)
    assert {"1.add_()#0", "1.relu_()#0"} <= replaced(model) and "1.mul()#0" not in replaced(model)
    agrees(model, plain, images, 1e-10)


def test_bitwise_training_and_state_that_leaves_have_none() -> None:
    model, images = made()
    managed(model, images, exact="bitwise")
    assert not replaced(model)
    plain = copy.deepcopy(outcore.release(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    managed(model, images, optimizer=optimizer, state={"parameters": "offload"})
    assert not replaced(model) & SUMS
    agrees(model, plain, images, 1e-4)


def test_what_it_is_expected_to_save() -> None:
    model, images = made()
    graph = outcore.capture(model, (images,))
    costs = account(graph)

    def busy(device_s: float, host_s: float) -> Any:
        timing = TimedRuns.of([device_s], dispatch_s=host_s)
        return replace(costs, calls={n: replace(c, forward=timing, backward=timing) for n, c in costs.calls.items()})

    fused = SelectedFusions.worth_it(graph, model, busy(1.0, 1e-4), RATE, CPU, issued=True)
    assert set(fused.scales) == SUMS
    _, less = fused.applied(graph, model, busy(1.0, 1e-4), RATE)
    total, size = less.calls["blocks.1.add_()#0"], costs.calls["stem#0"].output_bytes
    assert total.forward is not None and total.forward.median_s == pytest.approx(3 * size / (0.8 * RATE))
    assert total.backward is not None and total.backward.median_s == pytest.approx(3 * size / (0.8 * RATE))
    assert less.calls["blocks.1.mul()#1"].time_s == 0 and not less.calls["blocks.1.mul()#1"].outputs
    assert not SelectedFusions.worth_it(graph, model, busy(1e-6, 1.0), RATE, CPU, issued=True).scales


def test_a_network_without_any() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
    graph = outcore.capture(model, ((2, 3, 8, 8),))
    fused = SelectedFusions.worth_it(graph, model, account(graph), RATE, CPU, issued=True)
    assert fused.applied(graph, model, account(graph), RATE)[0] is graph
