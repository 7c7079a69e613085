"""Handing out gradients that lie in the graphs' memory, with graphs that are played on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.allocator.padding_search import PaddingBlock, PaddingSearch
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.graph.record.recording import Ref
from outcore.memory.cuda_graphs import step_graph
from outcore.memory.cuda_graphs.static_grads import StaticGrads, capture_parameters
from outcore.memory.cuda_graphs.step_graph import StepGraph, _ForwardUnderWay, _unowned, _wanted
from outcore.planner.memory.plan import plan_memory


class Played:
    """A function instead of a graph: the same memory every time."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


class Stage(StepGraph):
    """A product and its gradient."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.under_way, self.graphs = _ForwardUnderWay(), None

    def capture(self, tensors: list[torch.Tensor]) -> None:
        weight, bias = self.parameters
        (x,) = self.inputs = [torch.empty_like(t) for t in tensors]
        out = torch.empty(len(x), len(bias), dtype=x.dtype)
        self.outputs, self.wanted = [(_unowned(out), True)], [True]
        (gradient,) = self.gradients = [torch.empty_like(out)]
        self.places = StaticGrads(self.parameters)
        first, second = (place.detach() for place in self.places.places)

        def backward() -> None:
            first.copy_(gradient.mT @ x)
            second.copy_(gradient.sum(0))

        run = Played(lambda: out.copy_(nn.functional.linear(x, weight, bias).detach()))
        self.graphs = run, Played(backward)  # type: ignore[assignment]
        self.found = [True, True]
        self.template = Ref("value", "out")
        self.places.own = self.places.holders()  # with those that the functions hold


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
    assert model.weight.grad.data_ptr() == call.__self__.places.places[0].data_ptr()  # type: ignore[attr-defined]


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


def test_a_gradient_that_is_taken_between_forward_and_backward_is_not_overwritten() -> None:
    call, model, _ = stage()
    first, second = batches(2)
    call([first])[0].sum().backward()
    (out,) = call([second])
    held = model.weight.grad
    model.zero_grad()
    with pytest.raises(RuntimeError, match="clone gradients"):
        out.sum().backward()
    assert held is not None


def test_places_are_filled_as_backward_finds_the_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    unused = nn.Parameter(torch.ones(3))
    images = torch.randn(2, 3, 8, 8)
    places = StaticGrads([*model.parameters(), unused])
    want = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    with places.filled(places.parameters):
        found = torch.autograd.grad(model(images).square().sum(), places.parameters, allow_unused=True)
    assert found[-1] is None
    for parameter, place, gradient in zip(model.parameters(), places.places, want, strict=False):
        assert torch.equal(place, gradient) and place.stride() == parameter.stride()
    assert not any(p._backward_hooks for p in model.parameters())


def test_workspaces_are_given_back_after_every_step_and_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is recorded, not during its warm-up."""
    model, batch = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double(), batches(1)[0]
    outcore.within(
        model, (batch,), memory=None, plan={"0#0:out": "recompute"}, optimizer=0.0, quiet=True, exact="reassociated"
    )
    (entry,) = model.__dict__["forward"].admitted.values()
    stage = StepGraph(entry.compiled, model)
    stage.inputs, stage.tier, stage.wanted, stage.places = [batch], None, [True], StaticGrads(stage.parameters)
    stage.gradients = [torch.ones(4, 3, dtype=torch.float64)]
    given: list[int] = []
    monkeypatch.setattr(step_graph, "without_workspaces", lambda: given.append(1))
    stage.run()
    assert not given
    outputs = stage.run(PaddingSearch(torch.device("cpu")))
    assert len(given) == 3
    assert stage.differentiate(outputs, stage.parameters, step_graph.without_workspaces) == [True] * 4
    assert len(given) == 3 + 4


class Pool:
    """The memory of a recording."""

    device = torch.device("cpu")

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.bytes = sizes, sizes.pop(0)

    def fresh(self) -> Pool:
        return Pool(self.sizes)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [([100], [[]]), ([100, 80], [[], [PaddingBlock(8, 0)]]), ([100, 120, 100], [[], [PaddingBlock(8, 0)], []])],
)
def test_padding_blocks_that_save_nothing_are_left_out_again(sizes: list[int], want: list[list[PaddingBlock]]) -> None:
    recorded = []

    class Recorder(StepGraph):
        def __init__(self) -> None:
            self.graphs = None

        def record(self, pool: Any, padding: PaddingSearch, *, trace: bool = False) -> list[PaddingBlock]:
            self.pool = pool
            recorded.append(list(padding.padding_blocks))
            return [PaddingBlock(8, 0)] if trace and len(want) > 1 else []

    Recorder().record_padded(Pool(sizes), trace=True)  # type: ignore[arg-type]
    assert recorded == want and not sizes


def test_gradients_with_memory_of_their_own_are_planned_for_from_the_beginning() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    graph = outcore.capture(model, (torch.randn(4096, 64),))
    costs = by_bytes(account(graph), 1e10)
    ours, theirs = (
        plan_memory(graph, costs, budget_bytes=None, optimizer=0.0, standing=standing) for standing in (True, False)
    )
    there = [moment.bytes.gradients for moment in theirs.keeping.plain.moments]
    new = [max(0, now - before) for before, now in zip([0, *there], there, strict=False)]
    want = [b + max(there) - t + n for b, t, n in zip(theirs.outcome.curve, there, new, strict=True)]
    assert ours.outcome.curve.tolist() == want
    assert max(there) == sum(p.nbytes for p in model.parameters()) == sum(new)


class Losing(nn.Module):
    """Makes its loss itself, and returns more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.inner(x)
        return scores.square().mean(), scores


def test_backward_starts_from_the_loss_that_a_model_makes() -> None:
    model = Losing()
    outputs = list(model(batches(1)[0]))
    assert _wanted(outputs) == [True, False] and _wanted(outputs[1:]) == [True]


def test_differentiating_gives_the_outputs_up() -> None:
    model, batch = Losing(), batches(1)[0]
    want = torch.autograd.grad(model(batch)[0], list(model.parameters()))
    stage = StepGraph.__new__(StepGraph)
    stage.parameters = list(model.parameters())
    stage.places = StaticGrads(stage.parameters)
    outputs = list(model(batch))
    stage.wanted, stage.gradients = _wanted(outputs), [torch.ones_like(outputs[0])]
    alias = _unowned(outputs[1])
    assert torch.equal(alias, outputs[1])
    assert stage.differentiate(outputs, stage.parameters) == [True, True] and not outputs
    assert all(torch.equal(place, gradient) for place, gradient in zip(stage.places.places, want, strict=True))


def test_capture_parameters_are_other_parameters_in_the_same_memory() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    parameters, x = list(model.parameters()), torch.randn(3, 2, 4)

    def out() -> torch.Tensor:
        return model["b"](model["a"](model["rnn"](x)[0])).square().sum()

    want = torch.autograd.grad(out(), parameters)
    for parameter in parameters:
        parameter.register_hook(lambda _: pytest.fail("a hook of the user's"))
    with capture_parameters(model, parameters) as others:
        got = torch.autograd.grad(out(), others)
        assert not set(map(id, others)) & set(map(id, parameters))
        assert [p.data_ptr() for p in others] == [p.data_ptr() for p in parameters]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(any(w is p for p in parameters) for w in model["rnn"]._flat_weights)
