"""Layer norms and scaled sums as one kernel each way, on a GPU, against double precision."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.memory.op_fusion import select
from outcore.memory.op_fusion.layer_norm_cast import _LayerNorm
from outcore.memory.op_fusion.layer_scale_sum import LayerScaleSum
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.planner.memory.plan import MemoryPlan
from tests.memory.op_fusion.test_layer_scale import Block, Last

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
UNITS = {HALF: 2**-8, SINGLE: 2**-20, DOUBLE: 1e-13}


def near(found: torch.Tensor, wanted: torch.Tensor, kind: torch.dtype | None = None) -> None:
    """Within half a bit of what is written, and what sums of single precision may be off."""
    unit = UNITS[kind or found.dtype]
    sums = 1e-13 if found.dtype is DOUBLE else 1e-5
    off = (found.double() - wanted).abs()
    assert bool((off <= unit * wanted.abs() + sums * wanted.abs().max()).all()), off.max().item()


SIZES = [(3, 5, 7), (40001, 96), (70, 768), (9, 8192)]
LAYERS = [
    *((shape, HALF, HALF, "both") for shape in SIZES),
    ((40001, 96), SINGLE, SINGLE, "both"),
    ((300, 20), HALF, SINGLE, "weight"),
    ((300, 20), DOUBLE, DOUBLE, "none"),
    ((5, 1), SINGLE, SINGLE, "both"),
]


@pytest.mark.parametrize(("shape", "given", "kind", "affine"), LAYERS)
def test_layer_norm(shape: tuple[int, ...], given: torch.dtype, kind: torch.dtype, affine: str) -> None:
    torch.manual_seed(0)
    wide = DOUBLE if given is DOUBLE else SINGLE
    x = (3 * torch.randn(shape, device="cuda", dtype=DOUBLE) + 1).to(given).requires_grad_()
    parameters: list[torch.Tensor | None] = [None, None]
    for i in range({"both": 2, "weight": 1, "none": 0}[affine]):
        parameters[i] = torch.randn(shape[-1:], device="cuda", dtype=wide, requires_grad=True)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, *parameters)]
    g = torch.randn(shape, device="cuda", dtype=kind)
    y = _LayerNorm(None, kind)(x, shape[-1:], *parameters, 1e-6)
    wanted = F.layer_norm(exact[0], shape[-1:], exact[1], exact[2], 1e-6)  # type: ignore[arg-type]
    y.backward(g)
    wanted.backward(g.double())
    assert y.dtype is kind
    near(y, wanted)
    for mine, theirs in zip((x, *parameters), exact, strict=True):
        if mine is not None and theirs is not None:
            assert mine.grad is not None and theirs.grad is not None and mine.grad.dtype is mine.dtype
            if shape[-1] > 1:
                near(mine.grad, theirs.grad)


SUMS = [
    *((shape, HALF, SINGLE, "each") for shape in ((4, 96, 133, 121), (4, 7, 5, 3), (2, 1300, 3, 2))),
    ((4, 96, 33, 21), SINGLE, SINGLE, None),
    ((4, 7, 5, 3), DOUBLE, DOUBLE, "one"),
    ((4, 96, 33, 21), HALF, HALF, None),
]


@pytest.mark.parametrize(("shape", "given", "kind", "noise"), SUMS)
def test_scaled_sum(shape: tuple[int, ...], given: torch.dtype, kind: torch.dtype, noise: str | None) -> None:
    torch.manual_seed(0)
    x, residual, g = (
        torch.randn(shape, device="cuda", dtype=t).contiguous(memory_format=torch.channels_last)
        for t in (given, kind, kind)
    )
    by = None if noise is None else torch.rand(shape[0] if noise == "each" else 1, 1, 1, 1, device="cuda", dtype=kind)
    scale = torch.randn(shape[1], 1, 1, device="cuda", dtype=kind)
    mine = [t.detach().requires_grad_() for t in (x, scale, residual)]
    exact = [t.double().requires_grad_() for t in (x, scale, residual)]
    y = LayerScaleSum(1, kind)(mine[0], mine[1], by, mine[2])
    assert isinstance(y, torch.Tensor)
    wanted = exact[2] + exact[0] * exact[1] * (1 if by is None else by.double())
    y.backward(g)
    wanted.backward(g.double())
    assert y.stride() == x.stride()
    near(y, wanted)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype is a.dtype
        near(a.grad, b.grad)


def test_scaled_sum_in_two_types() -> None:
    torch.manual_seed(0)
    shape = (3, 96, 33, 21)
    x, residual, g, h = (
        torch.randn(shape, device="cuda", dtype=t).contiguous(memory_format=torch.channels_last)
        for t in (HALF, SINGLE, SINGLE, HALF)
    )
    scale = torch.randn(96, 1, 1, device="cuda")
    mine = [t.detach().requires_grad_() for t in (x, scale, residual)]
    exact = [t.double().requires_grad_() for t in (x, scale, residual)]
    found = LayerScaleSum(1, SINGLE, HALF)(mine[0], mine[1], None, mine[2])
    assert isinstance(found, tuple)
    y, copied = found
    wanted = exact[2] + exact[0] * exact[1]
    assert torch.equal(copied, y.to(HALF)) and copied.stride() == x.stride()
    torch.autograd.backward([y, copied], [g, h])
    wanted.backward(g.double() + h.double())
    near(y, wanted)
    for a, b in zip(mine, exact, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype is a.dtype
        near(a.grad, b.grad)


class Model(nn.Module):
    """As ConvNeXt, small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.blocks = nn.Sequential(Block(0.0), Last(), Block(0.0), Block(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x).contiguous(memory_format=torch.channels_last)))


WAYS = [
    *((graphs, policy, True) for graphs in (False, True) for policy in ("keep", "recompute", "budget")),
    (False, "recompute", False),
    (True, "keep", False),
]


@pytest.mark.filterwarnings("ignore:outcore. a step reserves")  # at this size, by what the allocator leaves unused
@pytest.mark.parametrize(("graphs", "policy", "half"), WAYS)
def test_trains_as_double_precision_does(
    graphs: bool, policy: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("layer_norms_worth_it", "scales_worth_it"):
        monkeypatch.setattr(select, choice, lambda rows, *_, **__: rows)
    torch.manual_seed(0)
    kind = SINGLE if half else DOUBLE
    model, images = Model().to("cuda", kind), torch.randn(2, 3, 640, 512, device="cuda", dtype=kind)
    exact = copy.deepcopy(model).double()
    plan: dict[str, str] | None = None
    if policy == "recompute":
        plan = {f"blocks.{i}.{name}:out": policy for i in (0, 2) for name in ("norm#0", "linear#0", "add_()#0")}
    options: dict[str, Any] = {"optimizer": 0.0, "quiet": True, "measure_s": 0.3, "exact": "reassociated"}
    with torch.autocast("cuda", HALF, enabled=half):
        outcore.within(model, (images,), memory=None, plan=plan, graphs=graphs, **options)
        if policy == "budget":
            whole = outcore.memory_plan(model)
            assert isinstance(whole, MemoryPlan)
            outcore.within(model, (images,), memory=int(0.8 * whole.plain_bytes), graphs=graphs, **options)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(images).to(kind).square().mean().backward()
    exact(images.double()).square().mean().backward()
    managed = model.__dict__["forward"]
    assert isinstance(managed, ManagedForward)
    (entry,) = managed.admitted.values()
    assert entry is not None and {"blocks.0.norm#0", "blocks.0.add_()#0", "blocks.1.add()#0"} <= set(
        entry.compiled.instead
    )
    largest = max(p.grad.abs().max().item() for p in exact.parameters() if p.grad is not None)
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= (2e-2 if half else 1e-10) * largest
