"""What a recording has read from Python, and whether it is still so.

A recording holds the numbers that Python saw while it was made. Those that follow from the arguments and the modes are
in its key (`outcore.graph.record.keys`); all others come from somewhere that the program can change between two calls:
plain attributes of modules, global names, variables around a function, defaults of parameters, hooks, which tensor a
buffer is. A `Snapshot` is the list of these places with what was there. It *holds* if the same is there now, and then,
and only then, may the recording run in the place of the model's own code.

Comparing happens in every call of the model, so it is made of a few loops that run inside the interpreter:

    lengths of all dictionaries and lists          ==  those of then
    every object in every place, one after another  is  that of then

Only where another object is found are values compared (`outcore.graph.reads.frozen`), and if they are equal, the new
objects are the ones to look for from there on. A hundred thousand comparisons by identity take a few milliseconds; a
model of 200 modules needs two to four thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter, call, contains, is_, itemgetter
from typing import Any

import torch
from torch import nn

from outcore.errors import VaryingError
from outcore.graph.naming import kind_of
from outcore.graph.reads.attributes import BOOKKEEPING, AttributeReads
from outcore.graph.reads.frozen import GONE, SameObject, attributes_of, frozen, needs_look, relaxed, seen_of
from outcore.graph.reads.functions import LookupPlace, places_of
from outcore.graph.record.keys import hooks_of

_STATE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST = 20_000
"""Entries of one container that are compared one by one; of a larger one, their number."""
_DEPTH = 6
_UNSEEN = ("_flat_weight",)
"""Attributes that repeat a module's parameters."""


class Snapshot:
    """Places that a recording has read, with what was there."""

    def __init__(
        self, model: nn.Module, values: Iterable[tuple[LookupPlace, Any]], used: Collection[int] | None = None
    ) -> None:
        self._modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._used = used
        """Tensors that the recording computes with, by identity; None for all."""
        self._values = [(place, relaxed(then, used)) for place, then in values]
        """Each place with a frozen copy of what was there."""
        self._state = [[(n, _tensor(t)) for n, t in _state(m)] for m in self._modules]
        self._hooks = [hooks_of(m) for m in self._modules]
        self._first = [dict(_state(m)) for m in self._modules]
        self._tensors = [t for tensors in self._first for t in tensors.values()]
        self.renewed = 0
        """How often other parameters or buffers of the same kind were found, for callers that hold the tensors."""
        self._compile()

    def __len__(self) -> int:
        """How many objects are compared."""
        return len(self._expected) + len(self._lengths) + len(self._absent[0]) + len(self._looked)

    def __deepcopy__(self, memo: Any) -> Snapshot:
        return self  # it is about these very objects

    def holds(self) -> bool:
        """Whether a recording that read this would read the same now."""
        try:
            same = (
                list(map(len, self._sized)) == self._lengths
                and all(map(is_, chain.from_iterable(map(call, self._getters, self._owners)), self._expected))
                and not any(map(contains, *self._absent))
                and not any(_is_patched(a) for a in self._plain_forwards if "forward" in a)
            )
        except (KeyError, AttributeError, ValueError):  # a name is gone, a cell is empty
            same = False
        if same and all(self._frozen(place) == then for place, then in self._looked):
            return True
        if next(self.changed(), None) is not None:
            return False
        self._compile()  # other objects with the same values
        tensors = [t for m in self._modules for _, t in _state(m)]
        self.renewed += not all(map(is_, tensors, self._tensors))
        self._tensors = tensors
        return True

    def refuse_replaced(self, who: str) -> None:
        """Raise `VaryingError` if a parameter or buffer is another tensor than at first, because `who` holds the first
        ones."""
        for module, before in zip(self._modules, self._first, strict=True):
            for name, tensor in _state(module):
                if before.get(name, tensor) is not tensor:
                    raise VaryingError(
                        f"{self._describe(module, name)} is another tensor than before, and {who} goes on with the "
                        f"one it was given; write into that one instead: {name}.copy_(value)"
                    )

    def changed(self) -> Iterator[str]:
        """What has changed, each described in words."""
        for place, then in self._values:
            if self._frozen(place) != then:
                yield place.description
        for module, state, hooks in zip(self._modules, self._state, self._hooks, strict=True):
            now_there = dict(_state(module))
            for name, then in state:
                if name not in now_there or _tensor(now_there[name]) != then:
                    yield self._describe(module, name)
            for name in now_there.keys() - {n for n, _ in state}:
                yield self._describe(module, name)
            if hooks_of(module) != hooks:
                yield self._describe(module, "hooks")
            if _is_patched(module.__dict__) and id(module.__dict__) in map(id, self._plain_forwards):
                yield self._describe(module, "forward")

    def moved(self, model: nn.Module, other: nn.Module) -> Snapshot:
        """The same places of another model of the same architecture, with what is there now."""
        pairs = zip(model.modules(), other.modules(), strict=True)
        there = {id(a.__dict__): b.__dict__ for a, b in pairs}
        places = [LookupPlace(there.get(id(p.owner), p.owner), p.name, p.description, p.item) for p, _ in self._values]
        used = self._used if other is model else None
        return Snapshot(other, [(p, frozen_at(p)) for p in places], used)

    def _frozen(self, place: LookupPlace) -> Any:
        return relaxed(frozen_at(place), self._used)

    def _describe(self, module: nn.Module, name: str) -> str:
        return describe_attribute(module, self._paths.get(id(module), ""), name)

    def _compile(self) -> None:
        """Make the loops of `holds`."""
        self._sized: list[Any] = []
        self._getters: list[Callable[[Any], Any]] = []
        self._owners: list[Any] = []
        self._looked = []
        names: dict[int, tuple[Any, list[str]]] = {}
        absent: list[tuple[Any, str]] = []
        seen: set[int] = set()
        for place, then in self._values:
            value = place.read()
            if value is GONE:
                absent += [(place.owner, place.name)] if place.item else []
                continue
            if place.item:
                names.setdefault(id(place.owner), (place.owner, []))[1].append(place.name)
            else:
                self._watch(attrgetter(place.name, place.name), place.owner)
            if self._open(value, _DEPTH, seen):
                self._looked.append((place, then))
        for owner, wanted in names.values():
            self._watch(itemgetter(*wanted) if len(wanted) > 1 else itemgetter(wanted[0], wanted[0]), owner)
        for module in self._modules:
            attributes = module.__dict__
            for entries in [attributes[name] for name in (*_STATE, *_HOOKS)]:
                self._sized.append(entries)
                if entries:
                    self._watch(dict.values, entries)
        self._plain_forwards = [m.__dict__ for m in self._modules if not _is_patched(m.__dict__)]
        self._lengths = list(map(len, self._sized))
        self._expected = list(chain.from_iterable(map(call, self._getters, self._owners)))
        self._absent = [owner for owner, _ in absent], [name for _, name in absent]

    def _watch(self, getter: Callable[[Any], Any], owner: Any) -> None:
        self._getters.append(getter)
        self._owners.append(owner)

    def _open(self, value: Any, depth: int, seen: set[int]) -> bool:
        """Watch what is inside a value that can change in place; returns whether it has to be compared by copy
        instead."""
        if depth == 0 or isinstance(value, _ATOMS) or id(value) in seen:
            return False
        seen.add(id(value))
        if needs_look(value):
            return True
        if isinstance(value, list | dict):
            self._sized.append(value)
        if isinstance(value, list | tuple | dict):
            if len(value) > _MOST:
                return False
            if type(value) is not tuple:
                self._watch(tuple, value)
            if isinstance(value, dict):
                self._watch(dict.values, value)
            inside = value.values() if isinstance(value, dict) else value
            return sum(self._open(v, depth - 1, seen) for v in inside) > 0  # all of them are opened
        attributes = attributes_of(value)
        if attributes is None:
            return False
        if attributes is not getattr(value, "__dict__", None):
            return True  # it has slots
        return self._open(attributes, depth - 1, seen)


_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.Tensor, nn.Module, torch.dtype, torch.device)


def frozen_at(place: LookupPlace) -> Any:
    """A copy of what a name refers to now; `GONE` where it does not exist."""
    value = place.read()
    return GONE if value is GONE else frozen(value)


def _is_patched(attributes: dict[str, Any]) -> bool:
    """Whether a module has a forward of its own that is not ours."""
    forward = attributes.get("forward")
    return forward is not None and not type(forward).__module__.startswith("outcore.")


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for store in _STATE:
        yield from module.__dict__[store].items()


def _tensor(value: Any) -> Any:
    """What Python can see of a parameter or buffer; another of the same kind is found by its name in a replay."""
    return seen_of(value) if isinstance(value, torch.Tensor) else SameObject(value)


def describe_attribute(module: nn.Module, path: str, name: str) -> str:
    """The name of an attribute in a sentence: ``self.step of Net``, and where that is."""
    return f"self.{name} of {type(module).__name__}" + (f" ({path})" if path else "")


def outer_places(model: nn.Module) -> list[LookupPlace]:
    """What the functions of a model may look up outside of it."""
    return places_of(composed(model))


def composed(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model whose forward is the user's code, not one of torch's layers."""
    return (module for module in model.modules() if kind_of(module) == "container")


def attribute_places(model: nn.Module) -> list[tuple[nn.Module, LookupPlace]]:
    """All plain attributes of all modules."""
    return [
        (module, LookupPlace(module.__dict__, name, describe_attribute(module, path, name)))
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # runs as it is, in replays too
        for name, value in module.__dict__.items()
        if (name not in BOOKKEEPING or name == "forward")
        and not name.startswith(_UNSEEN)
        and not type(value).__module__.startswith("outcore.")
    ]


def read_places(
    model: nn.Module, reads: AttributeReads, known: Iterable[tuple[nn.Module, LookupPlace]]
) -> tuple[list[LookupPlace], list[LookupPlace]]:
    """The attributes that a run has read; those that were there, and names that were not.

    Args:
        model: the model.
        reads: of the run.
        known: all attributes there were.
    """
    leaves = {id(m) for m in model.modules() if kind_of(m) != "container"} | reads.whole
    found = [p for m, p in known if id(m) in leaves or p.name in reads.read.get(id(m), ())]
    paths = {id(m): path for path, m in model.named_modules()}
    missing = []
    for module in (*reads.modules, *reads.strangers.values()):
        if id(module) in reads.made:
            continue
        before, path = reads.before[id(module)], paths.get(id(module), "")
        stranger = id(module) in reads.strangers
        for name in sorted(reads.read.get(id(module), ())):
            if name in before:
                if stranger:
                    found.append(LookupPlace(module.__dict__, name, describe_attribute(module, path, name)))
            elif not any(name in before[store] for store in _STATE if store in before):
                if not hasattr(type(module), name) or not _is_torch(type(module), name):
                    missing.append(LookupPlace(module.__dict__, name, describe_attribute(module, path, name)))
    return found, missing


def _is_torch(cls: type, name: str) -> bool:
    module_name = next((c for c in cls.__mro__ if name in c.__dict__), cls)
    return module_name.__module__.partition(".")[0] == "torch"
