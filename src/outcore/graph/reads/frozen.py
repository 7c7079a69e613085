"""A plain Python value as it is now, to be compared with what it is later.

A recording depends on numbers, strings, lists, dictionaries and small objects that the loop may change in place, so
that holding on to the object is not enough. `frozen` makes a copy of what it holds that equals another such copy if and
only if the same Python would run: types count (``1`` is not ``1.0``), the sign of zero counts, ``nan`` equals itself.

What has no plain content is compared by identity: tensors (a replay reads their numbers where they are), modules,
functions, classes, objects of torch and of the standard library. Objects of the user's classes are opened to a bounded
depth. The invariant: equal copies, equal behaviour; unequal copies may still behave alike, which costs a recording.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import sys
from collections import deque
from collections.abc import Collection
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

_DEPTH = 6
_ATOMS = (str, bytes, int, complex, bool, type(None), type(Ellipsis), range, torch.dtype, torch.device, enum.Enum)
_SEQUENCES = (list, tuple, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_OWN = {"torch", "numpy", "outcore", *sys.stdlib_module_names}
_MODELS = "outcore.models"
"""The package here whose code is a model's."""


class _Gone:
    def __repr__(self) -> str:
        return "nothing"


GONE = _Gone()
"""The value of a name that does not exist."""


class SameObject:
    """Equal to itself only; holds its object, so that no other gets its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is SameObject and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """A copy of what a value holds, equal to another if both hold the same."""
    kind = type(value)
    if isinstance(value, _ATOMS):
        return kind, value
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if depth == 0 or isinstance(value, torch.Tensor | torch.nn.Module | type):
        return SameObject(value)
    if isinstance(value, _SEQUENCES):
        return kind, tuple([frozen(v, depth - 1) for v in value])
    if isinstance(value, dict):
        return kind, tuple([(frozen(k, depth - 1), frozen(v, depth - 1)) for k, v in value.items()])
    if isinstance(value, set | frozenset):
        return kind, frozenset([frozen(v, depth - 1) for v in value])
    if isinstance(value, slice):
        return kind, value.start, value.stop, value.step
    if isinstance(value, np.ndarray):
        return kind, value.shape, value.dtype, hashlib.sha1(value.tobytes()).digest()
    if isinstance(value, _GENERATORS):
        return kind, repr(generator_state(value))
    if isinstance(value, MethodType):
        return kind, SameObject(value.__func__), SameObject(value.__self__)
    if isinstance(value, functools.partial):
        return kind, tuple(frozen(v, depth - 1) for v in (value.func, value.args, value.keywords))
    inside = attributes_of(value)
    return SameObject(value) if inside is None else (kind, frozen(inside, depth - 1))


def relaxed(copy: Any, used: Collection[int] | None) -> Any:
    """A frozen value in which tensors that a run did not compute with are compared by their kind only.

    Args:
        copy: the frozen value.
        used: identities of those it did compute with; None for all.
    """
    if used is None:
        return copy
    if isinstance(copy, SameObject):
        unused = isinstance(copy.value, torch.Tensor) and id(copy.value) not in used
        return seen_of(copy.value) if unused else copy
    if isinstance(copy, tuple | frozenset) and not isinstance(copy, torch.Size):
        return type(copy)([relaxed(part, used) for part in copy])
    return copy


def seen_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What Python can see of a tensor without its data."""
    stride = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return type(tensor), tuple(tensor.shape), stride, tensor.dtype, str(tensor.device), tensor.requires_grad


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of a user's class holds, by name; None for what is not opened."""
    kind = type(value)
    if kind is not SimpleNamespace and (is_foreign(kind.__module__) or callable(value)):
        return None
    own = getattr(value, "__dict__", None)
    names = {n for c in kind.__mro__ for n in _slots(c)} - {"__dict__", "__weakref__"}
    if own is None and not names:
        return None
    slots = {name: found for name in sorted(names) if (found := getattr(value, name, GONE)) is not GONE}
    return {**slots, **(own or {})} if slots or own is None else own


def needs_look(value: Any) -> bool:
    """Whether a change inside does not show in the identities of what it holds, so that it has to be copied to be
    compared."""
    return isinstance(value, (set, np.ndarray, deque, *_GENERATORS))


@functools.cache
def is_foreign(module: Any) -> bool:
    """Whether code of a Python module is not the model's: of torch, this package or the standard library.

    Extension types may have anything in the place of a module's name, and are not the model's either.
    """
    if not isinstance(module, str) or module.startswith(_MODELS):
        return not isinstance(module, str)
    return module.partition(".")[0] in _OWN


def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    own = f"_{cls.__name__.lstrip('_')}"
    listed = (names,) if isinstance(names, str) else tuple(names)
    return tuple(own + n if n.startswith("__") and not n.endswith("__") else n for n in listed)


def generator_state(generator: Any) -> Any:
    """The state of a random generator of Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state
