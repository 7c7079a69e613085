"""Gradients that several calls add to one tensor: autograd adds in place where it may, and takes new memory elsewhere.

The oracle is torch's own allocator, as its profiler tells. (Under a dispatch mode that looks at every tensor, as the
other tests of memory have it, autograd never adds in place.)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve


class Shared(nn.Module):
    """One large weight that two calls use: their gradients are not added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(300, 300, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)).sum()


class Fork(nn.Module):
    """One large value that goes several ways; its gradients are added in place."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.ways, self.first = ways, nn.Linear(5, 300)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.stack([(x * k).sum() for k in range(2, 2 + self.ways)]).sum()


class Held(nn.Module):
    """A sum hands one gradient to both of its inputs: while one still waits, the other's is not added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 300), nn.Linear(5, 300)

    def forward(self, x: Tensor) -> Tensor:
        waiting = self.first(x)
        a = self.second(x)
        small = a.sum(1)
        return ((waiting + a) * 3.0).sum() + (small * 5.0).sum()


class Joined(nn.Module):
    """The gradient of a part of a concatenation lies in that of the whole: nothing is added in place there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 300)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        once = (a * 2.0).sum()
        return once + (torch.cat([a, x.repeat(1, 200)], 1) * 3.0).sum()


def counted(model: nn.Module, x: Tensor) -> int:
    """The most that is allocated in backward, with the parameters and the input."""
    loss = model(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss.backward()
    now = most = 0
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most + sum(t.nbytes for t in (*model.parameters(), x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Shared, (2, 300)),
        (lambda: Fork(2), (200, 5)),
        (lambda: Fork(3), (200, 5)),
        (Held, (200, 5)),
        (Joined, (200, 5)),
    ],
    ids=["a shared weight", "two ways", "three ways", "a gradient that two hold", "a part of a larger one"],
)
def test_what_sums_of_gradients_take_is_what_the_allocator_gives(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = make(), torch.randn(shape)
    graph = outcore.capture(model, x)
    curve = memory_curve(graph, account(graph), optimizer=0.0)
    predicted = max(moment.bytes.total for moment in curve.moments if moment.phase == "backward")
    assert predicted == pytest.approx(counted(model, x), rel=0.01)


def test_the_sum_of_a_shared_weights_gradients_is_a_third_piece_of_memory() -> None:
    """In backward of the first call there are the weight, the gradient of the second call, its own, and their sum."""
    model, x = Shared(), torch.randn(2, 300)
    graph = outcore.capture(model, x)
    weight = 300 * 300 * 4
    curve = memory_curve(graph, account(graph), optimizer=0.0)
    seen = [m.bytes.total for m in curve.moments if m.phase == "backward" and m.call == "layer#0"]
    assert seen == [pytest.approx(3 * weight, rel=0.05), pytest.approx(4 * weight, rel=0.05)]
