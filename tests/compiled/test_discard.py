"""What is compiled and not used is given back; gradients in memory that is written again are kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from outcore.compiled.discard import discard
from outcore.compiled.in_place import install_compiled_forward
from outcore.compiled.settings import CompileSettings
from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep, compile_planned, compiling
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.memory.cuda_graphs.static_grads import GraphGradients


class Network(nn.Module):
    """Two layers, between which Python may not be traceable."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        x = self.first(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        result: torch.Tensor = self.second(x).tanh()
        return result


class Chooser:
    """Counts the graphs that it was asked for."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, partition: TracedStep) -> SavedChoice:
        """What torch saves."""
        self.graphs += 1
        return SavedChoice(partition.torch_choice(1.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks for it where Python could not be traced
@pytest.mark.parametrize("breaks", [False, True])
def test_what_one_partitioner_compiled_is_forgotten_and_what_another_did_stays(breaks: bool) -> None:
    torch._dynamo.reset()
    model, x = Network(breaks), torch.randn(3, 4)
    choosers = [Chooser(), Chooser()]
    partitioners = [Partitioner(chooser) for chooser in choosers]
    runs = [compile_planned(model.forward, partitioner, kernels=False) for partitioner in partitioners]
    with compiling():
        for _ in range(2):
            for run in runs:
                run(x).sum().backward()
        pieces = 2 if breaks else 1
        assert [chooser.graphs for chooser in choosers] == [pieces, pieces]
        discard(partitioners[0], torch.device("cpu"))
        runs[1](x).sum().backward()
        assert choosers[1].graphs == pieces, "what is used was compiled once more"
        runs[0](x).sum().backward()
        assert choosers[0].graphs == 2 * pieces, "what was discarded is still there"


def compiled_with(partitioner: Partitioner) -> weakref.ref[Any]:
    """Something that a compiled function holds."""
    references: list[weakref.ref[Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        held = nn.Linear(4, 4)
        references.append(weakref.ref(held))

        def run(*given: Any) -> Any:
            assert held.in_features
            return graph(*given)

        return run

    backend.partitioner = partitioner  # type: ignore[attr-defined]
    model = Network(False)
    torch.compile(model.forward, backend=backend)(torch.randn(3, 4))
    stays.append(model)
    return references[0]


stays: list[nn.Module] = []
"""Models that are still there, so that Dynamo keeps what it compiled for them."""


def test_what_a_discarded_graph_holds_is_free() -> None:
    torch._dynamo.reset()
    partitioner = Partitioner(Chooser())
    alive = compiled_with(partitioner)
    gc.collect()
    before = alive() is not None
    discard(partitioner, torch.device("cpu"))
    gc.collect()
    stays.clear()
    assert before
    assert alive() is None


class Static(torch.autograd.Function):
    """A product whose gradients are written to the same memory in every backward, as a replayed graph does."""

    memory: dict[int, torch.Tensor] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Its gradients."""
        x, weight = ctx.saved_tensors
        found = (gradient @ weight.t(), x.t() @ gradient)
        for place, value in enumerate(found):
            Static.memory.setdefault(place, torch.empty_like(value)).copy_(value)
        return tuple(Static.memory[place].view(value.shape) for place, value in enumerate(found))


@pytest.mark.parametrize("watched", [True, False])
def test_gradients_in_memory_that_is_written_again_add_up_and_can_be_kept(watched: bool) -> None:
    Static.memory.clear()
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    batches = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(6)]

    def is_overwritten(tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() == memory.data_ptr() for memory in Static.memory.values())

    gradients = GraphGradients(is_overwritten)
    kept: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    theirs: list[tuple[torch.Tensor, ...]] = []
    for number, x in enumerate(batches):
        if watched:
            gradients.keep()
        result = Static.apply(x, weight).clone()  # type: ignore[no-untyped-call]
        if watched:
            gradients.watch([result], [weight, x])
        result.square().sum().backward()
        expected = torch.autograd.grad((x @ weight).square().sum(), [weight, x])
        if number % 3 == 2:  # the gradients of two batches were added up
            expected = (expected[0] + theirs[-1][0], expected[1])
        theirs.append(expected)
        kept.append((weight.grad, x.grad))
        if number % 3 != 1:
            weight.grad = None
    same = all(
        torch.allclose(one, two)
        for ours, plain in zip(kept, theirs, strict=True)
        for one, two in zip(ours, plain, strict=True)
        if one is not None and one is not kept[1][0] and one is not kept[4][0]  # of which more was added
    )
    assert same == watched, "without being watched they are overwritten"


def test_steps_that_are_tried_leave_no_gradients() -> None:
    model, x = Network(False), torch.randn(3, 4, requires_grad=True)
    x.grad = held = torch.ones(3, 4)
    before = [p.detach().clone() for p in model.parameters()]
    settings = CompileSettings(None, OptimizerCost.of(0.0), kernels=False)
    install_compiled_forward(model, (x,), {}, settings)
    assert x.grad is held and torch.equal(held, torch.ones(3, 4))
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
