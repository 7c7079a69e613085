"""Recomputing a buffer: its writers run once more, without autograd, from values that are there.

They run under the modes they ran under in forward. A layer that keeps running statistics normalises again without
touching them; a random one draws the same numbers, because the states of its generators were noted in forward. Which
generators these are the step itself says, by the generator or the device it names and by the tensors it reads: a model
on a GPU also draws on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.graph.record.recording import Context, Step, Tape
from outcore.graph.structure import leaves
from outcore.memory.saved_tensors.recompute_batch_norm import BatchNormCall, norm_of
from outcore.ops.recompute_encode import FOLDING, again

States = Mapping[torch.Generator, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BufferRecompute:
    """How one buffer is recomputed."""

    steps: tuple[Step, ...]
    random: frozenset[str]
    """Steps that draw random numbers."""
    result: str
    """The value that ends up in the buffer's memory."""
    norm: BatchNormCall | None = None
    """The batch norm that the steps are, if they are one."""
    dtype: torch.dtype | None = None
    """Instead of steps: the result is cast to this type."""
    folding: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Products of matrices -> the values they read that required a gradient: torch computes them otherwise then."""

    @classmethod
    def cast(cls, value: str, dtype: str) -> BufferRecompute:
        """A recomputation that is a cast of a value to another type."""
        return cls((), frozenset(), value, dtype=getattr(torch, dtype))

    def run(
        self,
        model: nn.Module,
        constants: Mapping[str, torch.Tensor],
        values: dict[str, torch.Tensor],
        states: Mapping[str, States],
    ) -> torch.Tensor:
        """Run the steps on the values they need; returns the tensor that is first in the buffer."""
        if self.dtype is not None:
            return values[self.result].detach().to(self.dtype)
        tape = Tape(model, constants, values)
        with torch.no_grad():
            for step in self.steps:
                changed = _changed(step.context)
                if not changed and step.name not in self.random:
                    self._step(tape, step)
                    continue
                with under_autocast(changed), generators_at(states.get(step.name, {})):
                    self._step(tape, step)
        return tape.values[self.result]

    def _step(self, tape: Tape, step: Step) -> None:
        if (trained := self.folding.get(step.name)) is None:
            tape.step(step)
            return
        with torch.enable_grad():
            for value in trained:
                tape.values[value] = tape.values[value].detach().requires_grad_()
            tape.step(step)
        for value in (*trained, *step.outputs):
            tape.values[value] = tape.values[value].detach()


def compile_recompute(
    steps: Sequence[Step],
    result: str,
    model: nn.Module,
    types: Mapping[str, str],
    trained: Callable[[Step], tuple[str, ...]] = lambda _: (),
) -> BufferRecompute:
    """Prepare the recomputation of a buffer.

    Args:
        steps: its writers.
        result: the first value in it.
        model: the user's model.
        types: type of the block of each step.
        trained: the values that a step reads and that required a gradient.
    """
    prepared = tuple(
        replace(step, kind="function", target=_target(step, model, types[step.name]), drop=(), shapes=None)
        for step in steps
    )
    random = frozenset(step.name for step in steps if again(types[step.name]) == "random")
    folding = {step.name: trained(step) for step in steps if types[step.name] in FOLDING}
    return BufferRecompute(prepared, random, result, norm_of(steps, model, types), folding=folding)


def generator_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> States:
    """The states of the generators that a call may draw from, before it does."""
    own = [generator for _, generator in leaves((args, kwargs), torch.Generator)]
    devices = {tensor.device for _, tensor in leaves((args, kwargs), torch.Tensor)}
    if (named := kwargs.get("device")) is not None:
        devices.add(torch.device(named))
    return {g: g.get_state() for g in own or map(_generator, devices or {torch.get_default_device()})}


def _generator(device: torch.device) -> torch.Generator:
    """The generator that operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _target(step: Step, model: nn.Module, type_: str) -> Callable[..., Any]:
    """What to call instead of the step's own target."""
    statistics = again(type_) == "statistics"
    if step.kind == "module":
        module = model.get_submodule(step.target)
        if statistics:
            return NormAgain(module)
        return _Flagged(module) if again(type_) == "random" else module.forward
    if statistics:
        return _FUNCTIONS[type_]
    target: Callable[..., Any] = step.target
    return target


class _Flagged:
    """A module in the mode it was in when it was recorded."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now, self.module.training = self.module.training, self.training
        try:
            return self.module.forward(*args, **kwargs)
        finally:
            self.module.training = now


class NormAgain(_Flagged):
    """A batch or instance norm that does not update its running statistics."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m: Any = self.module
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if self.training or m.running_mean is None:
                return batch_norm_again(x, m.running_mean, m.running_var, m.weight, m.bias, True, 0.0, m.eps)
        elif self.training or not m.track_running_stats:
            return instance_norm_again(x, m.running_mean, m.running_var, m.weight, m.bias, True, 0.0, m.eps)
        result: torch.Tensor = super().__call__(x)
        return result


def _others(
    weight: torch.Tensor | None, mean: torch.Tensor | None, var: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Statistics to write into instead: None, unless their type decides in which type torch adds up."""
    if weight is not None or mean is None or var is None:
        return None, None
    return torch.zeros_like(mean), torch.zeros_like(var)


def batch_norm_again(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.batch_norm``, with the running statistics left as they are."""
    if training:
        return F.batch_norm(input, *_others(weight, running_mean, running_var), weight, bias, True, 0.0, eps)
    return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


def instance_norm_again(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.instance_norm``, with the running statistics left as they are."""
    if use_input_stats:
        return F.instance_norm(input, *_others(weight, running_mean, running_var), weight, bias, True, 0.0, eps)
    return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"batch_norm": batch_norm_again, "instance_norm": instance_norm_again}


def _changed(context: Context) -> list[tuple[str, bool, torch.dtype]]:
    """The autocast modes of a step that are not in force; backward runs without any."""
    return [row for row in context.autocast if row[1] or torch.is_autocast_enabled(row[0])]


@contextlib.contextmanager
def under_autocast(changed: list[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """A context with these autocast modes in force."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in changed:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


@contextlib.contextmanager
def generators_at(states: States) -> Iterator[None]:
    """A context in which generators draw from earlier states."""
    now = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in now.items():
            generator.set_state(state)
