"""Whether an optimizer's step may be taken for some parameters and then for others.

State leaves the device, and stages are given to ranks, because almost every optimizer updates each parameter by itself:
shown some of them, then the others, it does what it does for all at once. Some do not. A norm over all gradients
(LAMB), an estimate of the distance to the solution (Prodigy, D-Adaptation), a count of steps that every call of
``step`` raises, weights that are moved and moved back around a closure (SAM), noise that is drawn in the order of
parameters: each of these, taken in parts, trains something else without a word.

Users bring their own optimizers, so it is tried instead of known: two optimizers of the same kind take some steps on a
few numbers, one of them for all parameters at once, the other for one parameter after the other, the last one first,
with the same random numbers. They must agree bit for bit in parameters, settings and counters. Those of `torch.optim`
are known, LBFGS alone looks at all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.cost.optimizer_cost import same_kind
from outcore.errors import OutcoreError

__all__ = ["SeparableStep", "separable_step"]

_SHAPES = ((8, 4), (4,), (6, 4))
_STEPS = 12
"""Some wrappers do something else in every fifth or tenth step only."""


@dataclass(frozen=True, slots=True)
class SeparableStep:
    """What is known of an optimizer's step."""

    why_not: str | None = None
    """Why it cannot be taken in parts; None if it can."""
    random: bool = False
    """Whether it draws random numbers, so that ranks with a copy of the same parameter would draw others."""


def separable_step(
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> SeparableStep:
    """Find out whether an optimizer, or what a function makes of parameters, updates each parameter by itself.

    >>> separable_step(torch.optim.Adam).why_not is None
    True
    >>> separable_step(torch.optim.LBFGS).why_not
    'LBFGS looks at all parameters at once'
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if (known := _known(type(optimizer))) is not None:
            return known
        return _tried(same_kind(optimizer), type(optimizer).__name__)
    try:
        made = _made(optimizer, [nn.Parameter(torch.zeros(shape, device="cpu")) for shape in _SHAPES])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return SeparableStep(f"the optimizer could not be tried on a few small parameters ({said})")
    known = _known(type(made))
    return known if known is not None else _tried(optimizer, type(made).__name__)


def _made(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of some parameters, or of the matrices among them, if it takes no others (Muon)."""
    try:
        return make(parameters)
    except ValueError:
        parameters[:] = [p for p in parameters if p.ndim == 2]
        return make(parameters)


def _known(kind: type[torch.optim.Optimizer]) -> SeparableStep | None:
    if kind is torch.optim.LBFGS:
        return SeparableStep("LBFGS looks at all parameters at once")
    return SeparableStep() if kind.__module__.startswith("torch.optim.") else None


def _tried(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], name: str) -> SeparableStep:
    """Take the same steps whole, whole with other random numbers, and one parameter after the other."""
    with torch.random.fork_rng(devices=[]):
        try:
            whole, again, parted = (_Trial(make) for _ in range(3))
            random = False
            for number in range(_STEPS):
                whole.step(number, seed=number)
                again.step(number, seed=_STEPS + number)
                random = random or not whole.agrees_with(again)
                parted.step(number, seed=number, one_by_one=True)
                if not whole.agrees_with(parted):
                    what = "draws random numbers" if random else "does not update each parameter by itself"
                    return SeparableStep(f"{name} {what}", random)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return SeparableStep(f"{name} could not take a step on a few small parameters ({said})")
    return SeparableStep(random=random)


class _Trial:
    """An optimizer over a few small parameters."""

    def __init__(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=drawn, device="cpu")) for shape in _SHAPES]
        self.optimizer = _made(make, self.parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise OutcoreError(f"{type(self.optimizer).__name__} is no torch.optim.Optimizer")

    def step(self, number: int, *, seed: int, one_by_one: bool = False) -> None:
        drawn = torch.Generator().manual_seed(number)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=drawn, device="cpu")
        torch.manual_seed(seed)
        if not one_by_one:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        every = [group["params"] for group in groups]
        for parameter in reversed(self.parameters):
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = [p for p in parameters if p is parameter]
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            if self.optimizer.param_groups:
                self.optimizer.step()
        self.optimizer.param_groups = groups
        for group, parameters in zip(groups, every, strict=True):
            group["params"] = parameters

    def agrees_with(self, other: _Trial) -> bool:
        """Whether parameters are equal to the bit, settings and counters too."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return all(torch.equal(a, b) for a, b in pairs) and self._numbers() == other._numbers()

    def _numbers(self) -> list[Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        own = {k: v for k, v in vars(self.optimizer).items() if isinstance(v, int | float | torch.Tensor)}
        return [repr(groups), repr(own)]
