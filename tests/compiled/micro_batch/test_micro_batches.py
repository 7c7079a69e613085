"""Calls in micro-batches give what whole ones give: results, gradients of parameters and arguments, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.compiled.in_place import forward_of, install
from outcore.compiled.measured_peak import measured_peak
from outcore.compiled.micro_batch.in_parts import ForwardInParts, install_in_parts
from outcore.compiled.micro_batch.micro_batches import MicroBatches, divisors
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.settings import CompileSettings
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError


class Two(nn.Module):
    """Two arguments, one of them for all samples; two results in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, shift: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        """The result, and what it was made of."""
        hidden = F.gelu(self.first(x + shift)) * scale
        return {"result": self.second(hidden), "hidden": hidden.detach().argmax(-1)}


def _gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    found = [t.grad for t in (*model.parameters(), *inputs)]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_gradients_are_those_of_the_whole_batch(kept: int) -> None:
    torch.manual_seed(0)
    model, plain = Two().double(), Two().double()
    plain.load_state_dict(model.state_dict())
    given = [torch.randn(12, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)]
    ours, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.shape))
    out = MicroBatches(3, lambda: kept).run(model.forward, model, tuple(ours), {"scale": 2.0})
    expected = plain(*theirs, scale=2.0)
    torch.testing.assert_close(out["result"], expected["result"], rtol=1e-12, atol=1e-12)
    assert torch.equal(out["hidden"], expected["hidden"])
    weights = torch.randn(12, 4, dtype=torch.float64)
    (out["result"] * weights).sum().backward()
    (expected["result"] * weights).sum().backward()
    for one, two in zip(_gradients(model, *ours), _gradients(plain, *theirs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert len(calls) == 4  # once for each parameter


def test_results_without_gradients_have_none_and_a_graph_can_be_kept() -> None:
    model, plain = Two().double(), Two().double()
    plain.load_state_dict(model.state_dict())
    given = (torch.randn(12, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64))
    for each, out in (
        (model, MicroBatches(4, lambda: 1).run(model.forward, model, given, {})),
        (plain, plain(*given)),
    ):
        assert out["result"].requires_grad and not out["hidden"].requires_grad
        total = out["result"].square().sum()
        total.backward(retain_graph=True)
        total.backward()
        assert each.first.weight.grad is not None
    for one, two in zip(_gradients(model), _gradients(plain), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_an_argument_that_is_one_number_gets_its_gradient() -> None:
    class Scaled(nn.Module):
        """A layer times a number."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale  # type: ignore[no-any-return]

    model, samples, scale = Scaled(), torch.randn(6, 8), torch.tensor(2.0, requires_grad=True)
    MicroBatches(2, lambda: 1).run(model.forward, model, (samples, scale), {}).sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, model.layer(samples).sum())


def test_hooks_on_parameters_see_the_gradients_of_the_whole_batch() -> None:
    model, samples = nn.Linear(8, 4), torch.randn(12, 8)
    seen: list[Tensor] = []
    model.weight.register_hook(seen.append)
    with pytest.warns(UserWarning, match="hooks on parameters"):
        out = MicroBatches(3, lambda: 1).run(model.forward, model, (samples,), {})
    out.sum().backward()
    assert len(seen) == 1 and model.weight.grad is not None
    torch.testing.assert_close(seen[0], model.weight.grad)


def test_a_part_that_runs_again_draws_what_it_drew_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    samples = torch.rand(16, 8) + 1
    torch.manual_seed(3)
    out = MicroBatches(4, lambda: 1).run(model.forward, model, (samples,), {})
    torch.rand(7)  # generators go on in the loop
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    drawn = (out.detach() != 0).float() * 2
    torch.testing.assert_close(model[0].weight.grad, drawn.T @ samples)


def test_what_autocast_rounds_is_rounded_again() -> None:
    model, samples = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    gradients = []
    for each, run in ((model, MicroBatches(2, lambda: 0).run), (plain, None)):
        with torch.autocast("cpu", torch.bfloat16):
            out = run(each.forward, each, (samples,), {}) if run is not None else each(samples)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        gradients.append(_gradients(each))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


def test_parts_of_a_batch() -> None:
    assert divisors(12) == [6, 4, 3, 2, 1] and divisors(7) == [1] and divisors(1) == []


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _refused(model: nn.Module, args: Any, budget: int) -> CompiledPlan | None:
    """A plan in parts after a step of the whole batch was refused."""
    settings = CompileSettings(budget, OptimizerCost.of(0.0), kernels=False, offload=False)
    attempt = forward_of(model, settings)
    with pytest.raises(PlanError):
        install(attempt, args, {})
    return install_in_parts(model, args, {}, attempt, outcore.capture(model, args))


def test_a_batch_that_does_not_fit_is_divided() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_block(16) for _ in range(4))).double()
    plain, samples = copy.deepcopy(model), torch.randn(64, 32, 16, dtype=torch.float64)
    budget = 4 * 2**20
    plan = _refused(model, (samples,), budget)
    assert plan is not None and plan.micro_batches > 1 and "micro-batches" in plan.explain()
    own = sum(t.nbytes for t in (*model.parameters(), samples))
    assert own + measured_peak(lambda: model(samples).sum().backward(), torch.device("cpu")) <= budget
    for rows in (64, 24, 7):  # other batches are divided as well, or are small enough
        model.zero_grad(), plain.zero_grad()
        for each in (model, plain):
            each(samples[:rows]).square().mean().backward()
        for one, two in zip(_gradients(model), _gradients(plain), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert isinstance(model.__dict__["forward"], ForwardInParts)
    with torch.no_grad():
        torch.testing.assert_close(model(samples), plain(samples))


def test_what_sees_the_whole_batch_is_not_divided() -> None:
    class Centred(nn.Module):
        """Samples less their mean."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(_block(16) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x - x.mean(0))  # type: ignore[no-any-return]

    class Counted(nn.Module):
        """Samples divided by their number, which the graph does not show."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(_block(16) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) / x.shape[0]  # type: ignore[no-any-return]

    class Counting(Counted):
        """Counts its calls."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layers(x)  # type: ignore[no-any-return]

    hooked = nn.Sequential(_block(16), _block(16), _block(16), _block(16))
    hooked[1].register_forward_hook(lambda *_: None)
    for model in (Centred(), Counted(), Counting(), hooked):
        samples = torch.randn(64, 32, 16)
        assert _refused(model, (samples,), 2 * 2**20) is None
        assert "forward" not in model.__dict__
