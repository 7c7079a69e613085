"""A call that runs again in backward computes with what there was in forward."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.buffers import buffers_of
from outcore.cost.measured.saved_bytes import account


def test_running_statistics_that_another_call_moves_in_between() -> None:
    """A norm that uses its running statistics; torch writes them in the other call without counting it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 3)).double()
    model[1].eval()
    twin, x = copy.deepcopy(model), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    plan = {"1#0:out": "recompute", "2#0:out": "recompute"}
    outcore.within(model, (x,), memory=None, plan=plan, measure_s=0.05, quiet=True)
    for net in (model, twin):
        loss = net(x).square().sum()
        net[1].train()
        net[1](torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        net[1].eval()
        loss.backward()
    assert torch.equal(model[1].running_mean, twin[1].running_mean) and bool(twin[1].running_mean.any())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


class _Overwriting(nn.Module):
    """Overwrites what a value was made from, if it is told to; a second value has many readers."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(4))
        self.overwrites, self.deep = False, deep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.tanh(self.first(x))
        if self.deep:
            shared = torch.tanh(shared * self.weights[3])
        other = self.second(x) * 2
        made = shared + other
        total = made * self.weights[2] + shared * self.weights[0] + shared * self.weights[1]
        if self.overwrites:
            other.add_(1)
        return total + shared * self.weights[2] + other


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("retained", [False, True])
def test_what_is_brought_back_before_it_is_overwritten_uses_nothing_up(deep: bool, retained: bool) -> None:
    """A program that begins to overwrite what a recomputed value was made from, after it was planned."""
    torch.manual_seed(0)
    model, x = _Overwriting(deep).double(), torch.randn(3, 4, dtype=torch.float64)
    twin, graph = copy.deepcopy(model), outcore.capture(model, (x,))
    plan = dict.fromkeys((n for n in graph.values if n.startswith(("tanh", "add()#0"))), "recompute")
    outcore.within(model, (x,), memory=None, plan=plan, measure_s=0.05, quiet=True)
    for net in (model, twin):
        for net.overwrites in (False, True, True):
            loss = net(x).square().sum()
            if retained:
                loss.backward(retain_graph=True)
            loss.backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name


class _Axes(list[int]):
    """As Keras keeps a list that a layer has for an attribute."""


class _Axis(int):
    """An argument of a type that nobody knows."""


class _Means(nn.Module):
    """Notes the memory of a mean, which backward needs."""

    def __init__(self, axes: object) -> None:
        super().__init__()
        self.layer, self.axes = nn.Linear(4, 4), axes
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.mean(self.layer(x), dim=self.axes, keepdim=True)
        self.made.append(weakref.ref(mean.untyped_storage()))
        return torch.square(mean) + x


@pytest.mark.parametrize("axes", [[0, 1], _Axes([0, 1]), _Axis(1)])
def test_a_plan_counts_on_what_can_be_made_again_with_its_arguments_alone(axes: object) -> None:
    """A mean over the axes that a Keras layer keeps was planned to be made again, and was kept."""
    torch.manual_seed(0)
    model, x = _Means(axes).double(), torch.randn(3, 4, dtype=torch.float64)
    graph = outcore.capture(model, (x,))
    can = not buffers_of(graph, account(graph))["mean()#0:out"].obstacle
    assert can == (type(axes) is not _Axis)
    twin = copy.deepcopy(model)
    outcore.within(model, (x,), memory=None, plan={"mean()#0:out": "recompute"} if can else {}, quiet=True)
    made = model(x)
    assert (model.made[-1]() is None) == can
    for one in (made, twin(x)):
        one.sum().backward()
    assert torch.equal(model.layer.weight.grad, twin.layer.weight.grad)
