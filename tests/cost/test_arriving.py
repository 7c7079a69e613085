"""In which layout gradients arrive, against hooks on the tensors of a real backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.measured.saved_bytes import account


class Heads(nn.Module):
    """Attention written with views and transpositions, as everybody does."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        joined: Tensor = self.back(mixed.transpose(1, 2).reshape(3, 5, 8)) + x
        return joined


class Dense(nn.Module):
    """Gradients that are parts of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(3, 4, 2, stride=2), nn.Conv2d(7, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([torch.relu(self.up(x)), nn.functional.interpolate(x, scale_factor=2.0)], 1)
        out: Tensor = self.conv(wide)
        return out


class Mean(nn.Module):
    """A gradient without memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).sum()


class Watch(TorchFunctionMode):
    """Notes for each tensor that a function makes the strides of its gradient, if they are not its own."""

    def __init__(self) -> None:
        self.odd: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self.note, tensor.stride()))
        return result

    def note(self, own: tuple[int, ...], gradient: Tensor) -> None:
        if any(n > 1 and a != b for n, a, b in zip(gradient.shape, own, gradient.stride(), strict=True)):
            self.odd.append((tuple(gradient.shape), tuple(gradient.stride())))


CASES = [(Heads(), (3, 5, 8)), (Dense(), (2, 3, 6, 6)), (Mean(), (4, 5))]


@pytest.mark.parametrize(("net", "shape"), CASES, ids=lambda x: type(x).__name__)
def test_layouts_are_those_of_a_real_backward(net: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    graph = outcore.capture(net, (x,))
    found = [
        (graph.values[of].shape, stride)
        for cost in account(graph).calls.values()
        for of, stride in cost.arriving.items()
    ]
    with Watch() as watch:
        loss = net(x)
    loss.backward(torch.ones_like(loss))
    assert sorted(found) == sorted(watch.odd) and found


def test_a_view_whose_gradient_cannot_be_viewed_makes_a_copy() -> None:
    graph = outcore.capture(Heads(), [(3, 5, 8)])
    costs = account(graph)
    view = next(c for c in costs.calls.values() if c.type == "view")
    assert view.arriving and view.gradients[0].bytes == 4 * 3 * 5 * 24 and view.gradients[0].passes is None


def test_costs_with_layouts_are_read_as_they_were_written() -> None:
    costs = account(outcore.capture(Heads(), [(3, 5, 8)]))
    assert Costs.from_json(costs.to_json()) == costs


def test_calls_that_differ_in_that_alone_are_measured_apart() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.square(torch.tanh(x).t().reshape(-1) + torch.tanh(x + 1).reshape(-1)).sum()

    graph = outcore.capture(Two(), (torch.randn(64, 32, requires_grad=True),))
    costs = measure(graph, "cpu", time_limit_s=5, runs=3)
    first, second = (c for c in costs.calls.values() if c.type == "tanh")
    assert bool(first.arriving) != bool(second.arriving)
    assert first.backward != second.backward
