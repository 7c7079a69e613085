"""Handing out gradients that lie in the graphs' memory, with graphs that are played on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from outcore.graph.recording import Ref
from outcore.memory.graphed import Graphed, _holders


class Played:
    """A function instead of a graph: the same memory every time."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Stage(Graphed):
    """A product and its gradient, of which forward overwrites the memory of the last gradients."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.under_way = self.graphs = None

    def capture(self, tensors: list[torch.Tensor]) -> None:
        weight, bias = self.parameters
        (x,) = self.inputs = [torch.empty_like(t) for t in tensors]
        (out,) = self.outputs = [torch.empty(len(x), len(bias), dtype=x.dtype)]
        (gradient,) = self.gradients = [torch.empty_like(out)]
        first, second = self.found = (torch.empty_like(weight), torch.empty_like(bias))

        def forward() -> None:
            first.fill_(torch.nan)
            second.fill_(torch.nan)
            out.copy_(nn.functional.linear(x, weight, bias).detach())

        def backward() -> None:
            first.copy_(gradient.mT @ x)
            second.copy_(gradient.sum(0))

        self.graphs = Played(forward), Played(backward)  # type: ignore[assignment]
        self.template = Ref("value", "out")
        self.unshared = [_holders(g) for g in self.found]


def stage() -> tuple[Callable[[torch.Tensor], Any], nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    staged = Stage(model)
    return staged.__call__, model, copy.deepcopy(model)


def same(model: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, rtol=1e-13) for p, q in pairs if p.grad is not None or q.grad is not None)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(4, 5, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("zero", ["none", "zero", "never", "late"])
def test_gradients_are_those_of_plain_training_however_they_are_cleared(zero: str) -> None:
    call, model, twin = stage()

    def clear() -> None:
        for net in (model, twin):
            net.zero_grad(set_to_none=zero != "zero")

    for batch in batches(4):
        if zero in ("none", "zero"):
            clear()
        (out,) = call([batch])
        want = twin(batch)
        if zero == "late":
            clear()
        out.square().sum().backward()
        want.square().sum().backward()
        assert torch.equal(out, want) and same(model, twin)


def test_a_gradient_becomes_the_parameters_own_without_a_copy() -> None:
    call, model, _ = stage()
    (out,) = call(batches(1))
    out.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == call.__self__.found[0].data_ptr()  # type: ignore[attr-defined]


def test_while_somebody_holds_a_gradient_the_graphs_wait() -> None:
    call, model, twin = stage()
    first, second = batches(2)
    (out,) = call([first])
    held = torch.autograd.grad(out.sum(), list(model.parameters()))
    want = torch.autograd.grad(twin(first).sum(), list(twin.parameters()))
    assert call([second]) is None
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(held, want, strict=True))
    del held
    assert call([second]) is not None


def test_a_forward_whose_backward_can_no_longer_come_is_forgotten() -> None:
    call, model, twin = stage()
    first, second = batches(2)
    (out,) = call([first])
    assert call([second]) is None  # the first may still be differentiated
    del out
    (out,) = call([second])
    out.sum().backward()
    twin(second).sum().backward()
    assert same(model, twin)


def test_a_second_backward_is_refused() -> None:
    call, _, _ = stage()
    (out,) = call(batches(1))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="graphs=False"):
        out.sum().backward()
