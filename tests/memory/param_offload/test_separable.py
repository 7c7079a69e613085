"""Which optimizers may take their step in parts, and that the others train as plain PyTorch does nevertheless."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import OutcoreError
from outcore.memory.param_offload.separable import separable_step
from tests.memory.param_offload.own_optimizers import OWN, SEPARABLE, Averaged

TORCHS = [
    kind
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
]


@pytest.mark.parametrize("kind", TORCHS, ids=lambda kind: kind.__name__)
def test_all_of_torch_s_are_separable_but_lbfgs(kind: type[torch.optim.Optimizer]) -> None:
    """Those are not tried, by the rule that their module is torch's, so here they are: under another name."""
    other = type("Other", (kind,), {})
    assert separable_step(kind).why_not is None
    assert (separable_step(other).why_not is None) == (kind.__name__ != "SparseAdam")  # which takes no dense gradients


def test_lbfgs_is_not() -> None:
    assert separable_step(torch.optim.LBFGS).why_not == "LBFGS looks at all parameters at once"
    assert separable_step(torch.optim.LBFGS([nn.Parameter(torch.ones(2))])).why_not is not None


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_optimizers_of_users_are_tried(kind: Callable[..., torch.optim.Optimizer]) -> None:
    before = torch.random.get_rng_state()
    found = separable_step(kind)
    assert (found.why_not is None) == (kind in SEPARABLE)
    assert found.random == (kind.__name__ == "Noisy")
    assert torch.equal(before, torch.random.get_rng_state())
    made = kind([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])
    assert separable_step(made) == found and not made.state


def test_what_a_function_makes_is_tried_and_what_fails_is_not_separable() -> None:
    assert (
        separable_step(lambda params: Averaged(params, lr=0.3)).why_not
        == "Averaged does not update each parameter by itself"
    )
    assert "could not be tried" in (separable_step(lambda params: torch.optim.SGD([], 0.1)).why_not or "")
    assert "could not be tried" in (separable_step(lambda params: list(params)[7]).why_not or "")


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(48, 4))


def _train(make: Callable[..., Any], *, memory: str | None) -> list[Tensor]:
    model = _network()
    optimizer = make(model.parameters())
    if memory is not None:
        outcore.within(model, (torch.randn(4, 48),), memory=memory, optimizer=optimizer, quiet=True)
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(4, 48)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        needs = inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty
        if needs:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=3)


@pytest.mark.parametrize("make", [*OWN, _lbfgs], ids=lambda make: make.__name__)
def test_no_optimizer_trains_something_else_within_a_budget(make: Callable[..., Any]) -> None:
    """Of this network nearly all is parameters and state, so that a smaller budget has to move those."""
    plain = _train(make, memory=None)
    for memory in ("70%", "100%"):
        try:
            found = _train(make, memory=memory)
        except OutcoreError as refused:
            assert memory == "70%" and make not in SEPARABLE, refused
            assert "optimizer" in str(refused) and "state stays on the device" in str(refused)
        else:
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_state_that_is_asked_to_leave_is_refused_with_the_reason() -> None:
    model = _network()
    optimizer = Averaged(model.parameters())
    with pytest.raises(OutcoreError, match="Averaged does not update each parameter by itself"):
        outcore.within(
            model, (torch.randn(4, 48),), memory="100%", optimizer=optimizer, state={"optimizer": "offload"}, quiet=True
        )


def test_a_wrapper_that_is_no_optimizer_is_named() -> None:
    class Lookahead:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups = inner.param_groups

    model = _network()
    with pytest.raises(OutcoreError, match=r"Lookahead is neither.*optimizer=2\.0"):
        outcore.within(
            model, (torch.randn(4, 48),), memory="90%", optimizer=Lookahead(torch.optim.Adam(model.parameters())),
            quiet=True,
        )  # fmt: skip
