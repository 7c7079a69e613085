"""What an optimizer's state takes, from a class, a function or an instance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.optimizer_cost import OptimizerCost, _Traffic
from outcore.errors import OutcoreError


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (torch.optim.SGD, 0),
        (torch.optim.Adam, 2),
        (torch.optim.AdamW, 2),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adadelta, 2),
        (torch.optim.Adagrad, 1),
    ],
)
def test_an_instance_costs_what_its_class_does(kind: type[torch.optim.Optimizer], state: int) -> None:
    made = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)  # type: ignore[call-arg]
    assert OptimizerCost.of(made).state_per_parameter == state
    assert OptimizerCost.of(lambda params: kind(params, lr=0.1)).state_per_parameter == state  # type: ignore[call-arg]


def test_operations_and_bytes_are_counted_one_by_one() -> None:
    a, b = torch.ones(10), torch.ones(10)
    with _Traffic() as counted:
        assert (counted.operations, counted.bytes) == (0, 0)
        a.add_(b)  # reads both, writes one
        assert (counted.operations, counted.bytes) == (1, 120)
        torch.add(a, b)
        assert (counted.operations, counted.bytes) == (2, 240)
        torch.ones(()) + 1  # single numbers do not count
    assert (counted.operations, counted.bytes) == (2, 240)


def test_an_optimizer_of_matrices_alone_is_counted_with_matrices() -> None:
    assert OptimizerCost.of(lambda p: torch.optim.Muon(p, lr=0.1)).state_per_parameter == 1.0
    made = torch.optim.Muon([nn.Parameter(torch.ones(4, 4))])
    assert OptimizerCost.of(made).state_per_parameter == 1.0


def test_what_cannot_be_tried_is_named() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("not on a Tuesday")

    with pytest.raises(OutcoreError, match=r"Broken cannot take a step .*not on a Tuesday.*optimizer=2\.0"):
        OptimizerCost.of(lambda p: Broken(p, 0.1))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_costs_what_it_holds_when_its_history_is_full(search: str | None) -> None:
    params = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (2048, 4096)]
    nbytes = {str(i): p.nbytes for i, p in enumerate(params)}
    optimizer = torch.optim.LBFGS(params, lr=0.3, max_iter=4, history_size=5, line_search_fn=search)
    slopes = [torch.linspace(1, 40, len(p)) for p in params]

    def closure() -> Any:
        with torch.no_grad():
            for p, slope in zip(params, slopes, strict=True):
                p.grad = slope * p + 0.1 * p**3
            return sum(float(p.detach() @ p.grad) for p in params if p.grad is not None)

    for _ in range(6):
        optimizer.step(closure)
    cost = OptimizerCost.of(optimizer)
    (state,) = optimizer.state.values()
    assert len(state["old_dirs"]) == len(state["old_stps"]) == 5
    held = [t for t in tree_leaves(dict(state)) if isinstance(t, torch.Tensor) and t.numel() > 1]
    assert cost.state_bytes(nbytes) == sum(t.nbytes for t in held)
    before = [t.data_ptr() for t in held]
    del held, state
    with LiveBytes([*params, *(p.grad for p in params if p.grad is not None)]) as live:
        optimizer.step(closure)
        peak = live.peak
    replaced = 2 * 4 * sum(nbytes.values())  # four iterations, each of which puts a new pair in place of an old one
    assert before and peak - replaced <= cost.workspace_bytes(nbytes)


def test_a_step_that_asks_for_a_closure_is_given_one() -> None:
    class Asking(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            closure()
            return super().step()

    asked = OptimizerCost.of(lambda p: Asking(p, 0.1, momentum=0.9))
    assert asked.state_per_parameter == 1.0 and asked.traffic_per_parameter > 0


def test_state_in_lists_is_counted() -> None:
    class Listed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("last", [torch.zeros_like(p), {"three": torch.zeros_like(p)}])
            return super().step(closure)

    assert OptimizerCost.of(lambda p: Listed(p, 0.1)).state_per_parameter == 2.0


def test_what_is_no_optimizer_is_named_with_what_could_be_given() -> None:
    with pytest.raises(OutcoreError, match=r"dict is neither a torch.optim.Optimizer.*optimizer=2\.0"):
        OptimizerCost.of({"lr": 0.1})  # type: ignore[arg-type]
