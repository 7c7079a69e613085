"""Whoever watches module calls must not be in the way of a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outcore

X = torch.randn(4, 8)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


def network() -> Network:
    torch.manual_seed(0)
    return Network()


class Counting:
    """A backend that runs what it is given, and counts the calls in it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.calls += sum(node.op in ("call_function", "call_module", "call_method") for node in graph.graph.nodes)
        return graph.forward


@pytest.fixture(autouse=True)
def managed() -> Iterator[None]:
    """A model has trained under a plan in this process."""
    model = network()
    outcore.within(model, (X,), memory=None, plan={"act#0:out": "recompute"}, optimizer=0.0, quiet=True)
    model(X).sum().backward()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_module(model: nn.Module, backend: Counting) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend=backend)


def as_function(model: nn.Module, backend: Counting) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: model(x), backend=backend)


def in_place(model: nn.Module, backend: Counting) -> Callable[..., torch.Tensor]:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [as_module, as_function, in_place])
def test_other_models_are_still_compiled(compiled: Callable[..., Callable[..., torch.Tensor]]) -> None:
    backend, model = Counting(), network()
    want = model(X)
    assert torch.equal(compiled(model, backend)(X), want)
    assert backend.calls >= 3, "all three layers are in the graph"


class PartlyCompiled(nn.Module):
    """A model that compiles a part of itself."""

    def __init__(self, backend: Counting) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), network(), nn.Linear(8, 8)
        self.part = torch.compile(self.inner, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x).tanh() * 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_part_that_a_managed_model_compiles_is_compiled() -> None:
    backend = Counting()
    model = PartlyCompiled(backend)
    model(X).sum().backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert backend.calls
    model.zero_grad()
    outcore.within(model, (X,), memory=None, plan={"tanh()#0:out": "recompute"}, optimizer=0.0, quiet=True)
    torch._dynamo.reset()
    backend.calls = 0
    model(X).sum().backward()
    assert backend.calls
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
