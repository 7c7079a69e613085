"""The kernels of fused training against torch's own, on Triton's interpreter (`make kernels`)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.fusion.optimizer.fused_optimizer import FlatUpdate
from outcore.fusion.optimizer.updates import UPDATES
from outcore.fusion.rules import norm_max as rule
from outcore.fusion.rules.depthwise import depthwise
from tests.fusion.test_depthwise import SHAPES, _given

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (make kernels)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]
pytest.importorskip("triton")


@pytest.mark.parametrize("shape", SHAPES[:6])
def test_a_depthwise_convolution_and_its_gradients(shape: tuple[int, ...]) -> None:
    conv, x, weight = _given(shape, torch.float32, "cpu")
    found = depthwise(conv, x, weight, None)
    wide, own = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = F.conv2d(wide, own, None, conv.stride, conv.padding, 1, conv.groups)
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, (x, weight), grad)
    theirs = torch.autograd.grad(expected, (wide, own), grad.double())
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().abs().max()) <= 1e-6 * float(other.detach().abs().max())


@pytest.mark.parametrize("shape", [(2, 17, 5), (3, 40, 70), (1, 150, 3)])
@pytest.mark.parametrize("relu", [False, True])
def test_the_largest_values_of_a_norm(shape: tuple[int, ...], relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.kernels.batch_norm_max import scan, spread

    monkeypatch.setattr(rule, "_scan", scan)
    monkeypatch.setattr(rule, "_spread", spread)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(shape[2], dtype=torch.float64, requires_grad=True) for _ in range(2))
    own, theirs = (
        [torch.zeros(shape[2], dtype=torch.float64), torch.ones(shape[2], dtype=torch.float64)] for _ in "ab"
    )
    values, places = rule.norm_max(x, weight, bias, (own[0], own[1]), 0.1, 1e-5, relu=relu)
    normed = F.batch_norm(x.movedim(2, 1), *theirs, weight, bias, True, 0.1, 1e-5)
    expected, where = (normed.relu() if relu else normed).max(2)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    assert torch.equal(places[expected > 0], where[expected > 0])
    grad = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(values, (x, weight, bias), grad),
        torch.autograd.grad(expected, (x, weight, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.01}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_each_member_steps_as_by_its_own_optimizer_and_a_stopped_one_not(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Three members of 1,030 numbers, more than a program steps, at other rates; the last one is not alive."""
    size, rates = 1030, (0.1, 0.02, 0.3)
    rule = UPDATES[optimizer]
    members = [torch.randn(size) for _ in rates]
    plain = [torch.nn.Parameter(m.clone()) for m in members]
    optimizers = [optimizer([p], lr=r, **options) for p, r in zip(plain, rates, strict=True)]  # type: ignore[call-arg]
    group = optimizers[0].param_groups[0]
    flat = torch.cat(members)
    starts = [(slot * size + at, min(1024, size - at), slot) for slot in range(3) for at in (0, 1024)]
    table = torch.tensor([[s, s, n, slot] for s, n, slot in starts]).t().contiguous()
    kept = rule.state(group) if optimizer is not torch.optim.SGD or options else ()
    state = tuple(torch.zeros(3 * size) for _ in kept)
    kind = "sgd" if optimizer is torch.optim.SGD else "adam"
    shapes = ((torch.Size([3, size]), (size, 1)),)
    switches = bool(options.get("maximize")), bool(options.get("nesterov"))
    update = FlatUpdate(kind, *switches, ("w",), shapes, flat, torch.empty(3 * size), state, table)  # type: ignore[arg-type]
    alive = torch.tensor([True, True, False])
    for step in range(1, 4):
        grads = torch.randn(3, size)
        rows = [list(rule.numbers(o.param_groups[0], float(step), {}).values()) for o in optimizers]
        update({"w": grads}, torch.tensor(rows, dtype=torch.float32).t().contiguous(), alive)
        for one, p, grad in zip(optimizers, plain, grads, strict=True):
            p.grad = grad.clone()
            one.step()
    found: list[Tensor] = list(flat.view(3, size))
    atol = 1e-6 if kind == "sgd" else 5e-6  # one less 0.999 has three digits fewer in single precision
    for slot in (0, 1):
        torch.testing.assert_close(found[slot], plain[slot].detach(), rtol=1e-5, atol=atol)
    assert torch.equal(found[2], members[2])
