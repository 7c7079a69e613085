"""ReLU that keeps one bit per number: torch's numbers, torch's gradients, and of the memory one part in 32."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outcore
from outcore.memory.encode.bitmask_relu import relu_by_bits
from outcore.memory.encode.codecs import encode


def given(last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, 9).to(dtype)
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    return x.contiguous(memory_format=torch.channels_last) if last else x


def both(x: torch.Tensor, gradient: torch.Tensor, *, inplace: bool) -> list[list[torch.Tensor]]:
    found = []
    for way in (lambda t: F.relu(t, inplace=inplace), lambda t: relu_by_bits(t, inplace=inplace)):
        leaf = x.clone().requires_grad_()
        out = way(leaf * 1)
        found.append([out.detach(), *torch.autograd.grad(out, leaf, gradient)])
    return found


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_and_gradients_are_torch_s(dtype: torch.dtype, last: bool, inplace: bool) -> None:
    x = given(last, dtype)
    for gradient in (
        torch.randn_like(x),
        torch.randn(2, 5, 7, 9).to(dtype),
        torch.ones(1, 5, 1, 1).to(dtype).expand_as(x),
    ):
        plain, ours = both(x, gradient, inplace=inplace)
        for a, b in zip(plain, ours, strict=True):
            assert torch.equal(a.nan_to_num(3), b.nan_to_num(3)) and a.stride() == b.stride()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape", [(2, 40, 1, 1), (1, 40, 1, 1), (2, 1, 3, 4), (2, 5, 1, 4), (1, 5, 3, 4), (1, 1, 1, 1)]
)
def test_results_lie_in_memory_as_torch_s_also_where_they_could_lie_both_ways(
    shape: tuple[int, ...], form: torch.memory_format
) -> None:
    """Who comes next would compute in another order."""
    strides = torch.empty(shape, memory_format=form).stride()
    for one in (None, 1, 17):  # a dimension of one may have any stride
        odd = tuple(one if one and n == 1 else s for n, s in zip(shape, strides, strict=True))
        x = torch.randn(math.prod(shape)).as_strided(shape, odd).requires_grad_()
        want, got = torch.relu(x), relu_by_bits(x)
        assert torch.equal(want, got) and want.stride() == got.stride()
        for lies in {odd, strides, want.stride()}:
            gradient = torch.randn(math.prod(shape)).as_strided(shape, lies)
            (a,), (b,) = (torch.autograd.grad(y, x, gradient, retain_graph=True) for y in (want, got))
            assert torch.equal(a, b) and a.stride() == b.stride()


def test_a_gradient_goes_through_what_is_no_number_from_encoded_signs_too() -> None:
    x = torch.tensor([float("nan"), 1.0, 0.0, -1.0, float("inf")])
    assert encode("sign", x).decoded().tolist() == [1, 1, 0, 0, 1]


def test_only_bits_are_kept() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        relu_by_bits(x * 1)
    assert [t.nbytes for t in kept if t.dtype is torch.uint8] == [125]


def test_gradients_of_gradients() -> None:
    x = given().nan_to_num(1).double().requires_grad_()
    found = []
    for way in (F.relu, relu_by_bits):
        (first,) = torch.autograd.grad(way(x * x).sum() + way(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert torch.equal(*found)


class Net(nn.Module):
    """ReLUs called in every way, each read only by what needs no numbers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(c, 6, 3, padding=1) for c in (3, 6, 6, 6, 6, 6)])
        self.inplace, self.whole, self.hooked = nn.ReLU(inplace=True), nn.ReLU(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = (self.inplace, self.whole, self.hooked, lambda t: F.relu(t, True), torch.relu_, lambda t: t.relu())
        for conv, relu in zip(self.convs, ways, strict=True):
            x = F.avg_pool2d(relu(conv(x)), 3, 1, 1)
        return F.relu(x[:, ::2], inplace=True).mean((2, 3))


def test_a_model_s_relus_become_bits_however_they_are_called() -> None:
    torch.manual_seed(0)
    model = Net()
    seen: list[int] = []
    model.hooked.register_forward_hook(lambda *_: seen.append(1))
    twin, batch = copy.deepcopy(model), torch.randn(2, 3, 12, 12)
    plain = outcore.within(copy.deepcopy(model), (batch,), memory=None, plan={}, quiet=True)
    buffers = outcore.memory_plan(plain).keeping.buffers.values()
    plan = {b.name: "encode:sign" for b in buffers if b.need == "sign" and b.kind == "value"}
    assert len(plan) >= 6
    outcore.within(model, (batch,), memory=None, plan=plan, quiet=True)
    seen.clear()
    kept: list[int] = []
    for _ in range(2):
        want = torch.autograd.grad(twin(batch).square().sum(), tuple(twin.parameters()))
        loss = model(batch).square().sum()
        got = torch.autograd.grad(loss, tuple(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, tuple(model.parameters()))
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, again, strict=True))
        kept.append(len(seen))
    assert kept[1] > kept[0] > 0  # whoever listens at a module is still called


def test_writing_into_the_output_later_is_no_error_because_nothing_of_it_is_kept() -> None:
    x = torch.randn(10, requires_grad=True)
    out = relu_by_bits(x * 1)
    out.mul_(2)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, 2.0 * (x > 0))
    base = x * 1
    kept = base.square()
    relu_by_bits(base, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
