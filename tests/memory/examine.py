"""One step of a foreign model under every policy beside plain training: what there is to compare, and how it ended.

Plain training is the oracle, so it has to agree with itself first, wherever its memory lies. Where it does not, because
an operation adds up in no fixed order, torch is asked for deterministic operations throughout. Some have none (the
backward of 3-D pools on a GPU). Then every number that plain training repeats bit for bit has to be equal bit for bit,
and a number that varies from run to run has to be as near to plain training as plain training is to itself. A number
that varies by more than rounding has no value in plain training, and nothing can be compared with it: bf16 convolutions
of small volumes with channels last on a CPU read memory that nobody wrote (torch 2.13; the same step gives other weight
gradients, NaN among them, when `MALLOC_PERTURB_` fills free memory with something else).
"""

from __future__ import annotations

import copy
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.graph.structure import substitute
from outcore.memory.offload.backends import tier_for
from outcore.memory.saved_tensors.live_forward import LiveForward
from outcore.memory.saved_tensors.policy_table import compile_policies
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit

from ..foreign.foreign import Foreign
from .oracle import LINK, policies, total

MODES = ("recompute", "offload", "encode", "mixture")
PRECISIONS = ("fp32", "bf16 channels_last")

Numbers = dict[str, torch.Tensor]
Outcome = Literal["equal", "equal where plain repeats itself", "runs as it is", "not trainable", "unequal"]

_MORE, _MOST = 5, 42
"""Further plain steps at a time, and at most, to see which numbers vary, before one is said to differ."""
_NEAR = 4.0
"""Times the distance between plain steps, for numbers that vary in them."""
_ROUNDING = 0.05
"""Of the largest number: what sums in another order may differ by, in bf16. Beyond it plain training has no value."""


@dataclass(frozen=True)
class Verdict:
    """How a comparison ended."""

    outcome: Outcome
    note: str = ""
    """Under which conditions, where they are not the usual ones; or why there is nothing to compare."""
    differing: dict[str, list[str]] = field(default_factory=dict)
    """Policy -> the numbers that differ."""


def examine(foreign: Foreign, device: torch.device, precision: str) -> Verdict:
    """Train a model for one step, plainly and under every policy."""
    ways = [(way, False) for way in dict.fromkeys((precision, precision.partition(" ")[0]))]
    refused, varying = "", None
    for way, strict in [*ways, *((way, True) for way, _ in ways)]:
        with _deterministic(strict=strict):
            try:
                case = _Case(foreign, device, way)
                plain = _Plain(case.step(case.plainly))
            except RuntimeError as error:
                refused = refused or str(error).partition(", but you set")[0].splitlines()[0]
                continue
            plain.add(case.elsewhere())
            if plain.varying:
                varying = varying or (case, plain)
                continue
            return case.verdict(plain, note=_note(precision, way, strict=strict, refused=refused))
    if varying is None:
        return Verdict("not trainable", refused)
    case, plain = varying
    with _deterministic(strict=False):
        return case.verdict(plain, note=refused)


def _note(asked: str, way: str, *, strict: bool, refused: str) -> str:
    said = [f"in {way}, since {refused}"] if way != asked else []
    return "; ".join([*said, "deterministic operations throughout"] if strict else said)


class _Plain:
    """Plain training, several times: the numbers of the first, and how far others were from it."""

    def __init__(self, first: Numbers) -> None:
        self.first, self.steps = first, 1
        self.varying: dict[str, float] = {}
        """Numbers that are not the same in all steps -> the largest distance."""

    def add(self, step: Numbers) -> None:
        """One step more."""
        self.steps += 1
        for name in differing(self.first, step):
            self.varying[name] = max(self.varying.get(name, 0.0), self._distance(name, step))

    @property
    def undefined(self) -> list[str]:
        """Numbers that vary by more than rounding."""
        largest = {n: float(self.first[n].double().abs().max()) for n in self.varying if n in self.first}
        return [n for n in largest if not self.varying[n] <= _ROUNDING * largest[n]]

    def far(self, step: Numbers) -> list[str]:
        """Numbers of a step that are no plain training's."""
        near = {n: _NEAR * distance for n, distance in self.varying.items()}
        near |= dict.fromkeys(self.undefined, math.inf)
        return [n for n in differing(self.first, step) if not self._distance(n, step) <= near.get(n, 0.0)]

    def _distance(self, name: str, step: Numbers) -> float:
        """The largest difference; infinite where there is none to speak of."""
        if name not in self.first or name not in step:
            return math.inf
        found = float((self.first[name].double() - step[name].double()).abs().max())
        return math.inf if math.isnan(found) else found


class _Case:
    """A model with its inputs on a device, in one precision."""

    def __init__(self, foreign: Foreign, device: torch.device, way: str) -> None:
        torch.manual_seed(0)
        self.device, self.bf16 = device, way.startswith("bf16")
        self.model = foreign.build().train().to(device)
        self.args, self.kwargs = substitute(foreign.inputs(2), torch.Tensor, lambda t: t.to(device))
        if way.endswith("channels_last"):
            _channels_last(self.model)
            self.args, self.kwargs = substitute((self.args, self.kwargs), torch.Tensor, _images_last)
        self.state = copy.deepcopy(self.model.state_dict())
        self.draw = random.Random(0)

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def plainly(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def step(self, run: Callable[[], Any]) -> Numbers:
        """Loss, gradients and buffers of one step from the first state."""
        self.model.load_state_dict(self.state)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        with self.precision():
            output = run()
        loss = total(output)
        loss.backward()
        gradients = {f"gradient of {n}": p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        buffers = {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        return {"loss": loss.detach(), **gradients, **buffers}

    def elsewhere(self) -> Numbers:
        """A plain step whose memory lies elsewhere, and had something else in it before: some kernels of CPU libraries
        add up by where their tensors are, and some read what nobody wrote.

        What backward reads is a copy there.
        """
        sizes = [self.draw.randrange(1, 2 ** self.draw.randrange(4, 22)) for _ in range(100)]
        held = [torch.full((size,), self.draw.uniform(-1e3, 1e3), device=self.device) for size in sizes]
        held = held[:: self.draw.randrange(1, 4)]  # with holes in between
        copied = saved_tensors_hooks(torch.Tensor.detach, self.moved)
        try:
            with copied if self.device.type == "cpu" else nullcontext():
                return self.step(self.plainly)
        finally:
            held.clear()

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in the same layout, somewhere else."""
        if tensor.layout is not torch.strided or not tensor.is_floating_point() or not tensor.numel():
            return tensor.clone()
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = 32 * self.draw.randrange(64)
        memory = torch.empty(reach + start, dtype=tensor.dtype, device=tensor.device)
        memory[start:].copy_(tensor.as_strided((reach,), (1,)))  # all in between, since numbers may share a place
        return memory.as_strided(tensor.shape, tensor.stride(), start)

    def verdict(self, plain: _Plain, note: str) -> Verdict:
        """Every policy beside plain training."""
        self.model.load_state_dict(self.state)
        with self.precision():
            graph = outcore.capture(self.model, self.args, self.kwargs)
            assert graph.executable is not None
            recording = graph.executable[1]
            keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, LINK)
        found: dict[str, list[str]] = {}
        for mode in MODES:
            policy = policies(keeping, mode)
            table = compile_policies(graph, self.model, keeping.buffers, emit(keeping, policy))
            tier = tier_for(self.device, table.offloaded_bytes) if table.offloaded_bytes else None
            forward = type(self.model).forward.__get__(self.model)
            try:
                numbers = self.step(partial(LiveForward(table, tier).run, forward, self.args, self.kwargs))
            finally:
                if tier is not None:
                    tier.close()
            # Where additions in no fixed order may agree by chance: atomic ones, and of volumes in bf16 on a CPU.
            many = plain.varying or self.device.type == "cuda" or self.bf16
            while plain.far(numbers) and plain.steps < (_MOST if many else _MORE):
                for _ in range(_MORE):
                    plain.add(self.elsewhere())
            if far := plain.far(numbers):
                found[mode] = far
        if found:
            return Verdict("unequal", note, found)
        said = [note] if note else []
        if recording.uses_data or recording.volatile:
            said.append("it looks at data or draws numbers outside of torch; the plan is of one such run")
        if varying := plain.varying:
            said.insert(0, f"{len(varying)} of {len(plain.first)} numbers vary in plain training")
            if undefined := plain.undefined:
                said.insert(1, f"{len(undefined)} of them by more than rounding: {', '.join(undefined)}")
            return Verdict("equal where plain repeats itself", "; ".join(said))
        return Verdict("equal", "; ".join(said))


def differing(want: Numbers, got: Numbers) -> list[str]:
    """The names of numbers that are not the same bit for bit."""
    missing = sorted(want.keys() ^ got.keys())
    return missing + [n for n in want if n in got and not torch.equal(want[n], got[n])]


def _channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = _images_last(parameter.data)


def _images_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.to(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


@contextmanager
def _deterministic(*, strict: bool) -> Iterator[None]:
    """A fixed order where there is one; strictly, an error where there is none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    torch.backends.cudnn.deterministic = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which operations have no fixed order is seen from the numbers
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.deterministic = before[1]
