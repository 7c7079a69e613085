"""A recorded run of a model, and how to run it again.

A recording is a list of *steps*, each a call of one of the user's own modules or of a function, with its arguments as a
template: references to values, to the model's state or to constants stand where tensors were. Running the steps in
their order does what the model did: the same kernels on the same tensors, in-place operations and random draws in the
same order, under the same grad and autocast modes, so the result is bitwise the model's.

Numbers that Python saw while recording are part of the recording. Those that follow from input shapes, dtypes and
training flags are covered by the key the recording is stored under (see `outcore.graph.record.captured_module`). Those
that were read from tensors (``if mask.any():``) are *guards*: replaying evaluates them again and raises `Mismatch` if
the answer, or the shape of a value in a recording made on real data, is another one. Those that came from plain
attributes, globals and other Python are its *reads* (`outcore.graph.reads.snapshot`): whoever runs a recording again
asks first whether they hold. What the model's code wrote to the model is written again (`outcore.graph.reads.writes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from outcore.graph.record.numeric_settings import changed_settings, under_settings, with_changes
from outcore.graph.structure import leaves, substitute

if TYPE_CHECKING:
    from outcore.graph.reads.snapshot import Snapshot
    from outcore.graph.reads.writes import Effects

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
"""Types of arguments that hold no references."""


class Mismatch(Exception):  # noqa: N818 - a signal between replay and its caller, never shown
    """The data leads to another path than when the recording was made."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A placeholder of a tensor (or module) in a template."""

    kind: Literal["value", "state", "constant", "module"]
    name: str


@dataclass(frozen=True, slots=True)
class Context:
    """The modes a call ran under."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    settings: tuple[tuple[int, Any], ...] = ()
    """Settings that the forward has changed for a while (`outcore.graph.record.numeric_settings`)."""

    @classmethod
    def current(cls, devices: Iterable[str], settings: tuple[Any, ...] | None = None) -> Context:
        """The modes in force here and now; `settings` are those around the forward."""
        return cls(
            torch.is_grad_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
            () if settings is None else changed_settings(settings),
        )

    @contextlib.contextmanager
    def entered(self) -> Any:
        """A context with these modes in force."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.settings:
                stack.enter_context(under_settings(with_changes(self.settings)))
            yield


@dataclass(slots=True)
class Step:
    """One call as it is to be repeated."""

    name: str
    kind: Literal["module", "function", "guard"]
    target: Any
    """Path of the module, or the function itself."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    outputs: tuple[str, ...] = ()
    """Names of the tensors in the result, in the order `leaves` finds them."""
    rebinds: tuple[tuple[str, str], ...] = ()
    """(new, old): a tensor written in place by a call that does not return it carries a new name from here on."""
    shapes: tuple[torch.Size, ...] | None = None
    """What the shapes of the outputs must be, where they depend on data."""
    answer: Any = None
    """What a guard must return."""
    drop: tuple[str, ...] = ()
    """Values that no later step needs."""


@dataclass(slots=True)
class Recording:
    """One run of a model under one key."""

    inputs: tuple[str, ...]
    steps: list[Step]
    result: Any
    """What the model returned, as a template."""
    constants: Mapping[str, torch.Tensor]
    ambient: Context
    uses_data: bool
    """Whether Python read data of tensors."""
    volatile: bool
    """Holds facts of this one run (numbers drawn by Python or NumPy); must not be used for another."""
    dropped: bool = field(default=False)
    reads: Snapshot | None = None
    """What it depends on beside its key."""
    effects: Effects | None = None
    """What the model's code does to the model beside what the steps do."""

    def calls(self) -> dict[str, Step]:
        """The steps that compute something, by the names of their calls; guards only compare a value."""
        return {step.name: step for step in self.steps if step.kind != "guard"}

    def run(self, model: nn.Module, tensors: Iterable[torch.Tensor]) -> Any:
        """Run the model again; returns what the model returns."""
        if self.effects is not None:
            self.effects.refuse_lost()
        if not self.dropped:
            kept = [ref.name for _, ref in leaves(self.result, Ref)]
            kept += [name for write in self.effects.writes for name in write.values] if self.effects else []
            schedule_drops(self.steps, kept)
            self.dropped = True
        tape = Tape(model, self.constants, dict(zip(self.inputs, tensors, strict=True)))
        tape.run(self.steps, self.ambient)
        if self.effects:
            self.effects.apply(model, tape.get)
        return fill(self.result, tape.get)

    @property
    def holds(self) -> bool:
        """Whether everything it depends on beside its key is as it was."""
        return self.reads is None or self.reads.holds()

    @property
    def is_pure(self) -> bool:
        """Whether its steps are all that the model does: no numbers drawn by Python, nothing written to the model."""
        return not self.volatile and not self.effects


def schedule_drops(steps: list[Step], kept: Iterable[str]) -> None:
    """Record at each step which values are used there for the last time."""
    last: dict[str, Step] = {}
    for step in steps:
        for _, ref in leaves((step.args, step.kwargs), Ref):
            if ref.kind == "value":
                last[ref.name] = step
        for name in (*step.outputs, *(n for pair in step.rebinds for n in pair)):
            last[name] = step
    held = set(kept)
    drops: dict[int, list[str]] = {}
    for name, step in last.items():
        if name not in held:
            drops.setdefault(id(step), []).append(name)
    for step in steps:
        step.drop = tuple(drops.get(id(step), ()))


class Tape:
    """The values of a run in progress."""

    def __init__(
        self, model: nn.Module, constants: Mapping[str, torch.Tensor], values: dict[str, torch.Tensor]
    ) -> None:
        self.model, self.constants, self.values = model, constants, values

    def run(self, steps: Iterable[Step], ambient: Context) -> None:
        """Run steps in order, each under the modes it was recorded under."""
        current = ambient
        with contextlib.ExitStack() as stack:
            for step in steps:
                if step.context is not current and step.context != current:
                    stack.close()
                    if step.context != ambient:
                        stack.enter_context(step.context.entered())
                    current = step.context
                self.step(step)

    def step(self, step: Step) -> None:
        """Run one step and keep what it returns."""
        args = [a if type(a) in _PLAIN else fill(a, self.get) for a in step.args]
        kwargs = {k: fill(v, self.get) for k, v in step.kwargs.items()} if step.kwargs else {}
        target = _at(self.model, step.target) if step.kind == "module" else step.target
        result = target(*args, **kwargs)
        if step.kind == "guard":
            if result != step.answer:
                raise Mismatch(step.name)
            return
        if isinstance(result, torch.Tensor):
            self.values[step.outputs[0]] = result
        elif step.outputs:
            for name, (_, tensor) in zip(step.outputs, leaves(result, torch.Tensor), strict=True):
                self.values[name] = tensor
        for new, old in step.rebinds:
            self.values[new] = self.values[old]
        if step.shapes is not None and tuple(self.values[n].shape for n in step.outputs) != step.shapes:
            raise Mismatch(step.name)
        for name in step.drop:
            del self.values[name]

    def get(self, ref: Ref) -> Any:
        """The tensor or module of a reference."""
        match ref.kind:
            case "value":
                return self.values[ref.name]
            case "constant":
                return self.constants[ref.name]
            case _:
                return _at(self.model, ref.name) if ref.name else self.model


def _at(model: nn.Module, path: str) -> Any:
    """What a path names; submodules are found in their dictionaries, a tenth of the time that ``getattr`` takes."""
    found: Any = model
    for name in path.split("."):
        modules = found.__dict__.get("_modules")
        child = modules.get(name) if isinstance(modules, dict) else None
        found = child if child is not None else getattr(found, name)
    return found


def fill(template: Any, lookup: Callable[[Ref], Any]) -> Any:
    """The structure with the tensors and modules of its references."""
    if type(template) is Ref:
        return lookup(template)
    if type(template) is tuple or type(template) is list:
        return type(template)([fill(t, lookup) for t in template])
    return substitute(template, Ref, lookup)
