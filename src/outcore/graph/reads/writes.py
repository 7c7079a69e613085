"""What ``forward`` leaves behind on the model, so that a replay leaves it too.

A recording repeats calls on tensors; what the model's code did beside them (``self.aux_loss = loss``, ``self.seen =
True``, ``self.features.append(x)``) has to be done again after each replay, with the tensors of that replay. A run is
therefore compared with what was there before it: an attribute with another value is *set*, a list that has grown at its
end is *extended*, one with other entries *assigned* to, a dictionary with other entries is *updated*, as are the
attributes of an object (``self.config.problem_type = ...``). The value is a template, like the result of a recording.

Hooks that forward registers, as some libraries do in the first call, stand apart: they belong to the calls of the very
run that registers them, so a recording of that run cannot be replayed. The model itself has to be called once, or the
hooks registered (`Effects.register`) and the model recorded again.

What a template cannot say (what an object of the user's holds changed inside, a global name, a generator of NumPy's) is
named instead (`Effects.lost`), and the recording must not stand for the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from outcore.errors import VaryingError
from outcore.graph.reads.frozen import GONE, attributes_of, frozen
from outcore.graph.record.recording import Ref, fill
from outcore.graph.structure import leaves

_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Ref)


@dataclass(frozen=True, slots=True)
class ModuleWrite:
    """Something that forward writes to a module."""

    path: str
    """The path of the module."""
    name: str
    description: str
    """Its name in a sentence."""
    how: Literal["set", "buffer", "delete", "extend", "assign", "update", "attributes"]
    template: Any = None

    def apply(self, model: nn.Module, get: Callable[[Ref], Any]) -> None:
        """Repeat the write with other tensors."""
        module = model.get_submodule(self.path)
        value = _fresh(fill(self.template, get))
        match self.how:
            case "set":
                module.__dict__[self.name] = value
            case "buffer":
                module._buffers[self.name] = value
            case "delete":
                module.__dict__.pop(self.name, None)
            case "extend":
                module.__dict__[self.name].extend(value)
            case "assign":
                for i, entry in value.items():
                    module.__dict__[self.name][i] = entry
            case "update":
                module.__dict__[self.name].update(value)
            case "attributes":
                for name, entry in value.items():
                    setattr(module.__dict__[self.name], name, entry)

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values of the run that it needs."""
        return tuple(ref.name for _, ref in leaves(self.template, Ref) if ref.kind == "value")


@dataclass(frozen=True, slots=True)
class Effects:
    """All that a run does to Python."""

    writes: tuple[ModuleWrite, ...] = ()
    lost: tuple[str, ...] = ()
    """Changes that cannot be repeated, each described in words."""
    hooks: tuple[ModuleWrite, ...] = ()
    """Hooks that the run has registered."""

    def __bool__(self) -> bool:
        return bool(self.writes or self.lost or self.hooks)

    @property
    def repeatable(self) -> bool:
        """Whether it can be repeated without the tensors of a run."""
        return not self.lost and all(next(leaves(write.template, Ref), None) is None for write in self.writes)

    def apply(self, model: nn.Module, get: Callable[[Ref], Any]) -> None:
        """Do to a model what the run did."""
        self.refuse_lost()
        for write in self.writes:
            write.apply(model, get)

    def apply_plain(self, model: nn.Module, who: str) -> None:
        """Repeat the writes where none has tensors; raises `VaryingError` where one has."""
        self.refuse_tensors(who)
        for write in self.writes:
            write.apply(model, _no_tensor)

    def refuse_tensors(self, who: str) -> None:
        """Raise `VaryingError` if it cannot be repeated, or without the tensors of a run."""
        self.refuse_lost()
        for write in self.writes:
            if next(leaves(write.template, Ref), None) is not None:
                raise VaryingError(
                    f"forward writes {write.description}, a tensor of its own, and {who} does not bring it back; "
                    "return it from forward; or, if it is made only once, call the model once before"
                )

    def register(self, model: nn.Module) -> None:
        """Register the hooks that the run has registered."""
        for write in self.hooks:
            write.apply(model, _no_tensor)

    def refuse_lost(self) -> None:
        """Raise `VaryingError` if a replay would not repeat all of it."""
        if self.hooks:
            raise VaryingError(
                f"forward registers {self.hooks[0].description}, which a recording cannot do again; if that is done "
                "only once, call the model once before"
            )
        if self.lost:
            raise VaryingError(
                f"forward changes {self.lost[0]}, which a recording cannot do again; assign a new value to an "
                "attribute instead of changing one inside, or keep this out of forward; if it is done only once, call "
                "the model once before"
            )


def templated(value: Any, ref: Callable[[Any], Any], depth: int = 6) -> Any:
    """A value as a template; raises `TypeError` for what is neither tensors, plain values nor containers of those."""
    if isinstance(value, torch.Tensor):
        return ref(value)
    if isinstance(value, _SIMPLE):
        return value
    if depth and type(value) in (list, tuple):
        return type(value)([templated(v, ref, depth - 1) for v in value])
    if depth and type(value) is dict:
        return {key: templated(v, ref, depth - 1) for key, v in value.items()}
    raise TypeError(type(value).__name__)


def change_of(before: Any, after: Any, content: Any) -> tuple[str, Any]:
    """How an attribute came from one value to another; raises `TypeError` where that cannot be expressed.

    Args:
        before: the object before the run.
        after: the object after it.
        content: a copy of what the object held before, if it is a list or a dictionary; of an object its attributes,
            each with a frozen copy.
    """
    if after is not before:
        return "set", after
    if type(after) is list and len(after) >= len(content) and all(map(_is, after, content)):
        return "extend", after[len(content) :]
    if type(after) is list and len(after) == len(content):
        return "assign", {i: v for i, v in enumerate(after) if v is not content[i]}
    if type(after) is dict and content.keys() <= after.keys():
        missing = object()
        return "update", {k: v for k, v in after.items() if content.get(k, missing) is not v}
    if content is not None and (now := attributes_of(after)) is not None and content.keys() <= now.keys():
        changed = {k: v for k, v in now.items() if content.get(k, (GONE,))[0] is not v}
        if all(frozen(v) == content[k][1] for k, v in now.items() if k not in changed):
            return "attributes", changed
    raise TypeError(type(after).__name__)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _fresh(value: Any) -> Any:
    """The same in containers of its own."""
    if type(value) is list or type(value) is tuple:
        return type(value)([_fresh(v) for v in value])
    return {k: _fresh(v) for k, v in value.items()} if type(value) is dict else value


def _no_tensor(ref: Ref) -> Any:
    raise AssertionError(ref)
