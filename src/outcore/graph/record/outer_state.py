"""What a forward can reach outside of its model, and the way back to it.

Forwards remember: position indices in a dictionary of the module, a mask in an attribute of a class, a workspace in a
default argument. A run that is only a look (on tensors without numbers, on another size, on made-up data) would leave
its tensors there, and every later forward would compute with them. `OuterState` notes what the code of a model can
reach by name (`outcore.graph.reads.functions`), and puts it back:

| where | what is put back |
|---|---|
| global names, also those that a ``global`` statement would make; variables around functions; defaults | the object |
| classes of the model's authors, and functions: their attributes | those that were there, no others |
| lists, sets, deques and dictionaries, also with weak references; objects, modules beside the model | their contents |
| variables of threads and contexts | the object |

Installed libraries keep things that are none of the model's business (which backend a type of tensor belongs to,
compiled kernels); taking those back would only make them find out again. Of a library that is not the model's own, only
what has come to hold a tensor without numbers is put back. What code reaches without a name (``globals()[name]``, a
file) is not seen, nor is a variable of a context that had neither value nor default.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.graph.reads.frozen import GONE, is_foreign
from outcore.graph.reads.functions import LookupPlace, reached_from
from outcore.graph.record.contents import CONTAINERS, refill, same_contents, shallow_copy

__all__ = ["OuterState"]

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, torch.device, type, ModuleType)
_DEPTH = 8
_LIBRARY_STEP = 3
"""Levels for which one of a library's objects counts: a trainer that a model knows leads to everything there is."""
_MOST_SEEN = 100_000
"""Objects that are looked at; what comes then is left as it is."""
_MOST = 20_000
"""Entries of one container that are followed; a larger one is put back as a whole."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """Something with contents."""

    value: Any
    """A container, or a dictionary of attributes."""
    content: Any
    """A shallow copy."""
    own: bool
    """Whether it is the model's authors', not a library's."""


class OuterState:
    """What there is outside of a model before a run of it."""

    def __init__(self, model: nn.Module) -> None:
        code = reached_from((m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)), whole=True)
        packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "outcore"}
        self._inside = {id(module) for module in model.modules()}
        self._is_own = functools.cache(lambda name: name.partition(".")[0] in packages or not _is_installed(name))
        self._bindings = [(p, p.read()) for p in code.places.values() if not isinstance(p.owner, MappingProxyType)]
        self._bindings += [(place, place.read()) for f in code.functions.values() for place in _made_by(f)]
        self._classes = [(c, dict(vars(c))) for c in code.classes if self._is_own(c.__module__)]
        self._contexts: list[tuple[contextvars.ContextVar[Any], Any]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        self._holders: list[_Holder] = []
        self._seen: dict[int, Any] = {}
        for place in code.places.values():
            if place.module != "os":
                self._hold(place.read(), self._is_own(place.module), _DEPTH)
        for function in code.functions.values():
            self._hold(function.__dict__, self._is_own(function.__module__ or ""), _DEPTH)
        for module in model.modules():  # objects of other packages than its own
            for name, value in vars(module).items():
                if name not in _OF_MODULES:
                    self._hold(value, True, _DEPTH)

    def restore(self) -> None:
        """Put it back as it was."""
        for place, value in self._bindings:
            if (now := place.read()) is not value and (self._is_own(place.module) or _has_fake(now)):
                _bind(place, value)
        for cls, content in self._classes:
            for name, value in list(vars(cls).items()):
                if content.get(name, GONE) is not value and name not in _OF_CLASSES:
                    delattr(cls, name)
            for name, value in content.items():
                if vars(cls).get(name, GONE) is not value and name not in _OF_CLASSES:
                    setattr(cls, name, value)
        for variable, value in self._contexts:
            if variable.get(value) is not value and value is not GONE:
                variable.set(value)
        for owner, attributes in self._slots:
            for name, value in attributes.items():
                now = getattr(owner, name, GONE)
                if now is not value and (self._is_own(type(owner).__module__) or _has_fake(now)):
                    delattr(owner, name) if value is GONE else setattr(owner, name, value)
        for holder in self._holders:
            if not same_contents(holder.value, holder.content) and (holder.own or _has_fake(holder.value)):
                refill(holder.value, holder.content)

    def _hold(self, value: Any, own: bool, depth: int) -> None:
        """Note the contents of a value, and of all that it holds."""
        if depth <= 0 or isinstance(value, _ATOMS) or id(value) in self._seen or id(value) in self._inside:
            return
        if len(self._seen) > _MOST_SEEN:
            return
        self._seen[id(value)] = value
        if not isinstance(value, (*CONTAINERS, tuple, frozenset)):
            own = self._is_own(type(value).__module__) if not is_foreign(type(value).__module__) else own
        if isinstance(value, contextvars.ContextVar):
            found = value.get(contextvars.Context().run(_default_of, value))
            self._contexts.append((value, found))
            self._hold(found, own, depth - 1)
            return
        for inside in _contents_of(value, self._slots):
            if isinstance(inside, CONTAINERS):
                self._holders.append(_Holder(inside, shallow_copy(inside), own))
            if len(inside) <= _MOST:
                for part in list(inside.values() if isinstance(inside, dict) else inside):
                    self._hold(part, own, depth - (1 if own else _LIBRARY_STEP))


def _contents_of(value: Any, slots: list[tuple[Any, dict[str, Any]]]) -> Iterator[Any]:
    """The containers in which something keeps what it holds; slots of objects are noted beside."""
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        yield value
    elif isinstance(value, _WEAK):
        yield vars(value)["data"]
    if isinstance(value, (functools.partial, FunctionType, MethodType)):
        if isinstance(value, functools.partial):
            yield (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            yield (value.__self__,)
        return
    kind = type(value)
    if isinstance(value, (threading.local, SimpleNamespace, nn.Module)) or not is_foreign(kind.__module__):
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield attributes
            if isinstance(value, nn.Module):
                yield from (attributes[name] for name in ("_parameters", "_buffers", "_modules"))
        names = [name for c in kind.__mro__ for name in _slots_of(c)]
        if names and not is_foreign(kind.__module__):
            found = {name: getattr(value, name, GONE) for name in names}
            slots.append((value, found))
            yield tuple(found.values())


def _default_of(variable: contextvars.ContextVar[Any]) -> Any:
    """What an empty context has for a variable."""
    try:
        return variable.get()
    except LookupError:
        return GONE


def _slots_of(cls: type) -> list[str]:
    """Names under which objects of a class keep what is in its slots."""
    listed = cls.__dict__.get("__slots__", ())
    names = (listed,) if isinstance(listed, str) else tuple(listed)
    own = f"_{cls.__name__.lstrip('_')}"
    names = tuple(own + n if n.startswith("__") and not n.endswith("__") else n for n in names)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


_OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes in which torch keeps parameters, submodules, hooks and modes."""
_OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__"})
"""Attributes of classes that Python itself keeps."""


def _bind(place: LookupPlace, value: Any) -> None:
    if place.item:
        if value is GONE:
            place.owner.pop(place.name, None)
        else:
            place.owner[place.name] = value
    elif value is GONE:
        delattr(place.owner, place.name)
    else:
        setattr(place.owner, place.name, value)


def _has_fake(value: Any, depth: int = 4) -> bool:
    """Whether there is a tensor without numbers in something."""
    if isinstance(value, FakeTensor):
        return True
    if depth == 0 or isinstance(value, (*_ATOMS, FunctionType)):
        return False
    return any(
        _has_fake(part, depth - 1)
        for inside in _contents_of(value, [])
        for part in (inside.values() if isinstance(inside, dict) else inside)
    )


def _made_by(function: FunctionType) -> Iterator[LookupPlace]:
    """The global names that a function may make."""
    for name in _stored_names(function.__code__):
        module = function.__globals__.get("__name__", "")
        yield LookupPlace(function.__globals__, name, f"{name} of {module}", module=module)


@functools.cache
def _stored_names(code: CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _stored_names(part)]
    if dis.opmap["STORE_GLOBAL"] not in code.co_code[::2]:
        return tuple(inner)
    return (*(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"), *inner)


@functools.cache
def _is_installed(name: str) -> bool:
    """Whether a Python module is part of an installed package."""
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    return file is not None and any(part in ("site-packages", "dist-packages") for part in Path(os.fspath(file)).parts)
