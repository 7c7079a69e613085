"""Which Python names the functions of a model look up outside of it.

``forward`` and the functions it calls read global names, variables of the functions around them, and the defaults of
their parameters. No hook of Python tells of such reads, but the code of a function lists every name it may look up, so
they are found without running anything: from the forward of each module to whatever user code these names lead to
(functions, methods, classes, modules, objects, containers of those), and no further than the user's own packages.

What is found is more than one run reads, never less than what can be reached by name. What comes from outside of the
program (the clock, files) is not seen; environment variables are. A `LookupPlace` says where a value is: an entry of a
dictionary (of globals, of a class), a cell of a closure, or an attribute of a function.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.graph.reads.frozen import GONE, attributes_of, is_foreign

_DUNDER = frozenset({"__init__", "__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__"})
_DEPTH = 3
_ATOMS = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device)
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HELD = frozenset(nn.Module().__dict__)
"""Attributes that hold parameters, submodules and hooks."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupPlace:
    """Where a value is looked up."""

    owner: Any
    """A mapping, or an object of which `name` is an attribute."""
    name: str
    description: str
    """Its name in a sentence."""
    item: bool = True
    """Whether it is an entry of a mapping, not an attribute."""
    module: str = ""
    """The Python module whose code looks there."""

    def read(self) -> Any:
        """The value that is there now."""
        if self.item:
            return self.owner.get(self.name, GONE)
        try:
            return getattr(self.owner, self.name, GONE)
        except ValueError:  # an empty cell
            return GONE


def places_of(modules: Iterable[nn.Module]) -> list[LookupPlace]:
    """What the forwards of modules, and the user's functions they lead to, may look up outside of the modules."""
    return list(reached_from(modules).places.values())


def reached_from(modules: Iterable[nn.Module], *, whole: bool = False) -> ReachedCode:
    """The user's code that the forwards of modules lead to, and where it looks things up outside of the modules.

    Args:
        modules: what is run.
        whole: whether code counts that a recording repeats as a whole: hooks, custom autograd functions.
    """
    walk, modules = ReachedCode(whole=whole), list(modules)
    for module in modules:
        forward = module.__dict__.get("forward", type(module).forward)
        walk.reach(forward)
        walk.methods(type(module), _names_of(forward))
        for hook in (h for table in _HOOK_TABLES for h in module.__dict__[table].values()) if whole else ():
            walk.reach(hook)
    held = [v for m in modules for n, v in m.__dict__.items() if n not in _HELD and not isinstance(v, _ATOMS)]
    known = -1
    while known < len(walk.names):  # what is held may be asked for any name that some function looks up
        known = len(walk.names)
        for value in held:
            walk.reach(value, frozenset(walk.names))
    if walk.names & {"environ", "getenv"}:
        walk.note(vars(os.environ), "_data", "an environment variable", frozenset(), module="os")
    return walk


class ReachedCode:
    """Functions and classes that code leads to, and where they look things up."""

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole
        """Whether to follow what a recording repeats as a whole."""
        self.places: dict[tuple[int, str], LookupPlace] = {}
        self.names: set[str] = set()
        """All names that some function looks up."""
        self.functions: dict[int, types.FunctionType] = {}
        """By identity."""
        self.classes: dict[type, None] = {}
        self._classes: set[tuple[type, str]] = set()
        self._open: list[Any] = []  # nothing that was seen may lose its identity to another

    def reach(self, value: Any, names: frozenset[str] = frozenset(), depth: int = _DEPTH) -> None:
        """Follow a value that code refers to; `names` are those the code looks up on anything."""
        if depth == 0 or isinstance(value, _ATOMS):
            return
        value = _unwrapped(value)
        if isinstance(value, nn.Module):
            self.methods(type(value), ("forward",))
            return
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.reach(part, names, depth - 1)
        elif isinstance(value, type):
            if not issubclass(value, nn.Module | torch.autograd.Function):  # those run as they are, in replays too
                self.methods(value, names | _DUNDER)
            elif self.whole:
                self.methods(value, ("forward", "setup_context", "backward"))
        elif isinstance(value, types.ModuleType):
            if not is_foreign(value.__name__):
                for name in sorted(names & value.__dict__.keys()):
                    told = f"{name} of {value.__name__}"
                    self.note(value.__dict__, name, told, names, depth - 1, module=value.__name__)
        elif isinstance(value, list | tuple | set | frozenset | dict):
            for part in value.values() if isinstance(value, dict) else value:
                if not isinstance(part, _ATOMS):
                    self.reach(part, names, depth - 1)
        elif not is_foreign(type(value).__module__):
            self.methods(type(value), names | _DUNDER)
            for part in (attributes_of(value) or {}).values():
                self.reach(part, names, depth - 1)

    def function(self, function: types.FunctionType) -> None:
        """Record what a function looks up, and follow it."""
        module_name = function.__globals__.get("__name__", function.__module__)
        if id(function) in self.functions or is_foreign(module_name):
            return
        self.functions[id(function)] = function
        names = _names_of(function)
        self.names |= names
        for name in sorted(names & function.__globals__.keys()):
            self.note(function.__globals__, name, f"{name} of {module_name}", names, module=module_name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            description = f"{name} around {function.__qualname__} of {module_name}"
            self.note(cell, "cell_contents", description, names, item=False, module=module_name)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                description = f"a default of {function.__qualname__} of {module_name}"
                self.note(function, name, description, names, item=False, module=module_name)

    def methods(self, cls: type, names: Iterable[str]) -> None:
        """Record and follow what these names are on a user's class."""
        for base in cls.__mro__:
            if is_foreign(base.__module__):
                continue
            self.classes[base] = None
            for name in sorted(set(names) & base.__dict__.keys()):
                if (base, name) in self._classes:
                    continue
                self._classes.add((base, name))
                value = base.__dict__[name]
                description = f"{base.__name__}.{name} of {base.__module__}"
                self.note(base.__dict__, name, description, frozenset(), key=base, module=base.__module__)
                self.methods(cls, _names_of(value) - {name})

    def note(
        self,
        owner: Any,
        name: str,
        description: str,
        names: frozenset[str],
        depth: int = _DEPTH,
        *,
        item: bool = True,
        key: Any = None,
        module: str,
    ) -> None:
        """Record a place, and follow what is there."""
        place = LookupPlace(owner, name, description, item, module)
        where = (id(owner if key is None else key), name)
        if where in self.places and not names:
            return
        value = place.read()
        if not (isinstance(value, types.ModuleType) and is_foreign(value.__name__)):
            self.places[where] = place
            self._open.append(owner)
            self.reach(value, names, depth)


def _unwrapped(value: Any) -> Any:
    """The function inside methods, properties and what ``functools`` wraps around one."""
    for _ in range(8):
        if isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        else:
            break
    return value


def _names_of(function: Any) -> frozenset[str]:
    """The names that the code of a function may look up: global ones and attributes."""
    function = _unwrapped(function)
    if not isinstance(function, types.FunctionType):
        return frozenset()
    found = set(_code_names(function.__code__))
    inner = [c.cell_contents for c in function.__closure__ or () if _filled(c)]
    wrapped: list[Callable[..., Any]] = [f for f in inner if isinstance(f, types.FunctionType)]
    for inside in wrapped[:8]:  # decorators
        found |= _code_names(inside.__code__)
    return frozenset(found)


@functools.cache
def _code_names(code: types.CodeType) -> frozenset[str]:
    names = {*code.co_names, *(n for inner in _inner(code) for n in inner.co_names)}
    return frozenset(n for n in names if n.isidentifier())  # others were put there by a tool that rewrites assertions


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
