"""Training programs, each run twice: as it is, and with its models under policies. Whatever it notes must be equal.

A program is a function of a `Run`. It makes its models, passes each through `run.manage` where a user would call
`outcore.within`, trains, and notes what it sees: losses, outputs, attributes, gradients, weights. Nothing else about a
program is known, so it may do what Python can.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.graph.record.recorder import planning
from outcore.graph.structure import leaves
from outcore.planner.memory.evaluate import StepModel

from ..oracle import LINK, policies

Program = Callable[["Run"], None]
PROGRAMS: dict[str, Program] = {}
VARIANTS: dict[str, list[str]] = {}
"""Programs that are one with several cases: its name -> theirs."""


def program(function: Program) -> Program:
    """Add a program to the collection."""
    assert function.__name__ not in PROGRAMS
    PROGRAMS[function.__name__] = function
    return function


def variants(**cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a program once for every case, which it gets as its second argument."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for name, case in cases.items():

            def one(run: Run, case: Any = case) -> None:
                function(run, case)

            PROGRAMS[f"{function.__name__}_{name}"] = one
            VARIANTS.setdefault(function.__name__, []).append(f"{function.__name__}_{name}")
        return function

    return add


class Run:
    """One run of a program, and what it noted."""

    def __init__(self, mode: str | None, seed: int = 0) -> None:
        self.mode, self.seed = mode, seed
        """How models are managed; none for plain training."""
        self.notes: list[tuple[str, Any]] = []
        self.managed: list[nn.Module] = []

    def manage(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
        """What a user would write as `outcore.within`."""
        if self.mode is None:
            return model
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        with planning():
            graph = outcore.capture(model, args, kwargs)
        costs = by_bytes(account(graph), 1e9)
        keeping = StepModel(graph, costs, 0.0, LINK)
        plan = keeping.resolved(policies(keeping, self.mode, self.seed))
        outcore.within(
            model, args, kwargs, memory=None, plan=plan, costs=costs, optimizer=0.0, stream=False, quiet=True
        )
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        self.managed.append(model)
        return model

    def note(self, *values: Any, **named: Any) -> None:
        """Remember values; tensors are copied."""
        for value in values:
            self.notes.append(("", _kept(value)))
        for name, value in named.items():
            self.notes.append((name, _kept(value)))

    def note_model(self, *models: nn.Module) -> None:
        """Remember every weight, gradient and buffer."""
        for model in models:
            for name, parameter in model.named_parameters():
                self.notes.append((name, _kept(parameter)))
                self.notes.append((f"{name}.grad", None if parameter.grad is None else _kept(parameter.grad)))
            for name, buffer in model.named_buffers():
                self.notes.append((name, _kept(buffer)))

    def train(
        self,
        model: nn.Module,
        batch: Callable[[int], Any],
        *,
        steps: int = 3,
        before: Callable[[int], None] = lambda _: None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        lr: float = 0.05,
    ) -> None:
        """The usual loop: `before` runs ahead of every step."""
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        for step in range(steps):
            before(step)
            given = batch(step)
            output = model(*given) if isinstance(given, tuple) else model(given)
            value = loss(output) if loss is not None else square(output)
            self.note(loss=value)
            optimizer.zero_grad()
            value.backward()
            self.note_model(model)
            optimizer.step()


def square(output: Any) -> torch.Tensor:
    """A loss of whatever a model returns."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.square().mean() for t in found]).sum()


def images(step: int, batch: int = 2, channels: int = 3, side: int = 12) -> torch.Tensor:
    """A batch of images."""
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(100 + step))


def rows(step: int, batch: int = 6, width: int = 8) -> torch.Tensor:
    """A batch of rows."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(200 + step))


def run_program(name: str, mode: str | None, seed: int = 0) -> Run:
    """Run a program from one random state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    run = Run(mode, seed)
    PROGRAMS[name](run)
    for model in run.managed:
        outcore.release(model)
    return run


def differences(plain: Run, managed: Run) -> list[str]:
    """Where two runs differ."""
    if len(plain.notes) != len(managed.notes):
        return [f"{len(plain.notes)} notes against {len(managed.notes)}"]
    pairs = zip(plain.notes, managed.notes, strict=True)
    return [f"{i}: {name}" for i, ((name, a), (other, b)) in enumerate(pairs) if name != other or not _same(a, b)]


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return type(a) is type(b) and bool(a == b)
