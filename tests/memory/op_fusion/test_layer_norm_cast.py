"""Layer norm as one pass, in the types of its neighbours: plain training up to rounding, under every policy."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.buffers import buffers_of
from outcore.cost.measured.saved_bytes import account
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion import layer_norm_cast
from outcore.memory.op_fusion.layer_norm_cast import _Pass, layer_norms_of
from outcore.memory.op_fusion.select import SelectedFusions
from tests.memory.fused import managed, replaced
from tests.memory.oracle import policies

CPU = torch.device("cpu")
RATE = 1e9


class Block(nn.Module):
    """A layer norm before a linear layer; one that a sum reads too; a function, of two dimensions, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.second, self.out = nn.LayerNorm(12, bias=False), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.first(x)))).float()
        y = self.second(x)
        return F.layer_norm(self.out(y).float() + y, x.shape[1:])


class Turned(nn.Module):
    """A layer norm between a convolution's channels and another convolution, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).contiguous().float()
        return self.last(self.norm(y).permute(0, 3, 1, 2))


def made(which: str = "block") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if which == "block":
        return nn.Sequential(Block(), Block()), torch.randn(3, 5, 12)
    return Turned(), torch.randn(2, 3, 9, 7)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm_cast, "_DEVICES", {"cpu"})


def agrees(model: nn.Module, plain: nn.Module, images: torch.Tensor, bound: float) -> None:
    for m in (model, plain):
        m.zero_grad()
        out = m(images)
        (out * torch.linspace(-1, 2, out.numel()).view(out.shape).square()).sum().backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and (a.grad - b.grad).abs().max() <= bound * largest, name


def found(model: nn.Module, images: torch.Tensor, half: bool = True) -> dict[str, tuple[str, tuple[str, ...]]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        graph = outcore.capture(model, (images,))
        rows = layer_norms_of(graph, model, account(graph), CPU)
    return {name: (norm.kind, norm.casting) for name, norm in rows.items()}


def test_which_norms_write_what() -> None:
    model, images = made()
    block = Block()
    assert found(block, images) == {
        "first#0": ("bfloat16", ("up#0",)),
        "second#0": ("float32", ()),
        "layer_norm()#0": ("float32", ()),
    }
    assert {kind for kind, _ in found(block, images, half=False).values()} == {"float32"}
    turned, photos = made("turned")
    assert found(turned, photos) == {"norm#0": ("bfloat16", ("last#0",))}
    graph = outcore.capture(model, (images,))
    assert not layer_norms_of(graph, model, account(graph), torch.device("cuda"))


def test_a_hook_sees_what_it_would_see() -> None:
    _, images = made()
    block = Block()
    handle = block.up.register_forward_pre_hook(lambda *_: None)
    assert found(block, images)["first#0"] == ("float32", ())
    handle.remove()
    handle = block.first.register_forward_hook(lambda *_: None)
    assert "first#0" not in found(block, images)
    handle.remove()
    inside = nn.Sequential(nn.Sequential(nn.LayerNorm(12)), nn.Linear(12, 3))
    handle = inside[0].register_forward_hook(lambda *_: None)
    assert found(inside, images)["0.0#0"] == ("float32", ())
    handle.remove()
    assert found(inside, images)["0.0#0"] == ("bfloat16", ("1#0",))


def test_numbers_that_the_user_gets_or_that_are_written_over_stay() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.norm(x)
            z = self.linear(y).float()
            written = self.linear(self.norm(z))
            z += 1  # where torch has kept a copy, if it has
            turned = F.layer_norm(self.linear(x).float().transpose(0, 1), (12,))
            return y, written, z, turned

    _, images = made()
    assert found(Others(), images) == {"norm#0": ("float32", ()), "layer_norm()#0": ("float32", ())}


@pytest.mark.parametrize("shape", [(4, 12), (2, 3, 5, 7), (1, 1), (3, 2, 9)])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
def test_the_operation(shape: tuple[int, ...], affine: str, dims: int, kind: torch.dtype, apart: bool) -> None:
    torch.manual_seed(0)
    size = shape[-dims:]
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 1).to(kind)
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if apart else x
    wide = torch.float64 if kind is torch.float64 else torch.float32
    affines = [torch.randn(size, dtype=wide) if affine in given else None for given in (("both", "weight"), ("both",))]
    g = torch.randn(shape).to(wide)
    grads, outputs = [], []
    for exact in (False, True):
        to = torch.float64 if exact else None
        given = [None if t is None else t.to(to or t.dtype, copy=True).requires_grad_() for t in (x, *affines)]
        if exact:
            y = F.layer_norm(given[0], size, given[1], given[2], 1e-5)  # type: ignore[arg-type]
        else:
            y = _Pass.apply(*given, torch.Size(size).numel(), 1e-5, wide)
        y.backward(g.to(y.dtype))
        outputs.append(y.detach().double())
        grads.append([t.grad for t in given if t is not None and t.grad is not None])
    bound = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}[kind]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5 if wide is torch.float32 else 1e-12)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound * max(1.0, b.abs().max().item()))


def test_trains_as_plain_does() -> None:
    model, images = made()
    model, images = model.double(), images.double()
    plain = copy.deepcopy(model)
    managed(model, images)
    assert len(replaced(model)) == 6
    for _ in range(2):
        agrees(model, plain, images, 1e-6)  # the model itself casts to single precision


@pytest.mark.parametrize("which", ["block", "turned"])
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload", "mixture"])
def test_under_autocast_and_every_policy(which: str, mode: str) -> None:
    model, images = made(which)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = managed(model, images)
        if mode != "keep":
            chosen = policies(plan.keeping, mode)
            if mode == "offload":  # also what is too small to be worth it
                chosen = {b.name: mode for b in plan.keeping.buffers.values() if b.kind == "value" and b.savers}
            assert managed(model, images, plan=chosen).policy or mode == "mixture"
        assert ({"0.first#0", "1.layer_norm()#0"} if which == "block" else {"norm#0"}) <= replaced(model)
        for _ in range(2):
            agrees(model, plain, images, 2e-2)


def test_what_is_kept_is_what_autograd_keeps() -> None:
    model, images = made()
    with torch.autocast("cpu", torch.bfloat16):
        plan = managed(model, images)
        buffers, kept = plan.keeping.buffers, set()

        def note(t: torch.Tensor) -> torch.Tensor:
            kept.add((t.dtype, t.untyped_storage().nbytes()))
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(images)
    assert buffers["0.first#0:out"].bytes == images.numel() * 2 and buffers["0.first#0:out"].savers
    assert "0.up#0~0" not in buffers and "0.first#0~1" not in buffers
    plain = buffers_of(*_plain(model, images))
    assert plain["0.first#0:out"].bytes == images.numel() * 4 and "0.up#0~0" in plain
    assert (torch.bfloat16, images.numel() * 2) in kept


def _plain(model: nn.Module, images: torch.Tensor) -> tuple[Any, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(outcore.release(model), (images,))
        return graph, account(graph)


def test_a_plan_is_held_against_training_as_the_user_wrote_it() -> None:
    model, images = made()[0], torch.randn(3, 400, 12)
    with torch.autocast("cpu", torch.bfloat16):
        costs = outcore.measure(outcore.capture(model, (images,)), runs=2)
        plain, fused = (managed(model, images, costs=costs, exact=exact) for exact in ("bitwise", "reassociated"))
    assert fused.keeping.plain.peak_bytes < plain.keeping.plain.peak_bytes
    assert fused.plain_bytes == plain.plain_bytes and fused.order.plain_s == pytest.approx(plain.keeping.plain_s)
    assert fused.document().memory_order is None


def test_memory_that_has_a_policy_by_hand_stays() -> None:
    model, images = made()
    with torch.autocast("cpu", torch.bfloat16):
        managed(model, images, plan={"0.up#0~0": "recompute"})
        assert "0.first#0" not in replaced(model) and "1.first#0" in replaced(model)
        model(images).sum().backward()


def test_bitwise_training_has_none() -> None:
    model, images = made()
    managed(model, images, exact="bitwise")
    assert not replaced(model)


def test_a_budget_is_kept_and_the_plan_can_be_read_back() -> None:
    model, images = made()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        whole = managed(model, images)
        least = managed(model, images, memory=int(0.9 * whole.peak_bytes))
        assert least.peak_bytes <= 0.9 * whole.peak_bytes
        document = least.document()
        managed(model, images, plan=document)
        agrees(model, plain, images, 2e-2)


def test_what_it_is_expected_to_save() -> None:
    model, images = made()
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(model, (images,))
        costs = account(graph)

    def busy(device_s: float, host_s: float) -> Any:
        timing = TimedRuns.of([device_s], dispatch_s=host_s)
        return type(costs)(**{**costs.__dict__, "calls": {n: _with(c, timing) for n, c in costs.calls.items()}})

    slow = busy(1.0, 1e-4)
    fused = SelectedFusions.worth_it(graph, model, slow, RATE, CPU, issued=True)
    assert set(fused.layer_norms) == {f"{i}.{n}#0" for i in (0, 1) for n in ("first", "second", "layer_norm()")}
    _, less = fused.applied(graph, model, slow, RATE)
    norm, linear = less.calls["0.first#0"], less.calls["0.up#0"]
    assert norm.forward is not None and norm.forward.median_s == pytest.approx(images.numel() * 6 / (0.8 * RATE))
    assert norm.backward is not None and norm.backward.median_s == pytest.approx(images.numel() * 10 / (0.8 * RATE))
    assert linear.forward is not None and linear.forward.median_s < 1.0
    late = busy(1e-6, 1.0)
    assert not SelectedFusions.worth_it(graph, model, late, RATE, CPU, issued=True).layer_norms


def _with(cost: Any, timing: TimedRuns) -> Any:
    from dataclasses import replace

    return replace(cost, forward=timing, backward=timing)
