"""One observed run of a model: what it depends on, and what it changes.

Before the run everything Python can see is copied (`outcore.graph.reads.frozen`): all plain attributes of all modules,
and what the functions of the model may look up outside of it. While it runs, attributes that are read and written are
recorded (`outcore.graph.reads.attributes`). After it, and before the model is put back as it was, the copies are
compared: what was read becomes the recording's `Snapshot`, what is different its `Effects`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.errors import CaptureError
from outcore.graph.naming import kind_of
from outcore.graph.reads.attributes import AttributeReads
from outcore.graph.reads.frozen import GONE, attributes_of, frozen, generator_state
from outcore.graph.reads.snapshot import (
    Snapshot,
    attribute_places,
    describe_attribute,
    frozen_at,
    outer_places,
    read_places,
)
from outcore.graph.reads.writes import Effects, ModuleWrite, change_of, templated


class WatchedRun:
    """A run of a model, from before it to after it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.reads = AttributeReads(model)
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._leaves = {id(m) for m in self.reads.modules if kind_of(m) != "container"}
        self._attributes = [(m, place, frozen_at(place)) for m, place in attribute_places(model)]
        self._outer = [(place, frozen_at(place)) for place in outer_places(model)]
        self._contents = {(id(m), p.name): _content(m.__dict__[p.name]) for m, p, _ in self._attributes}
        self._hooks = {id(m): {name: dict(m.__dict__[name]) for name in _hook_tables(m)} for m in self.reads.modules}
        self._buffers = {id(m): dict(m._buffers) for m in self.reads.modules if id(m) not in self._leaves}
        self._generators = [(g, generator_state(g)) for g in self._found_generators()]
        self._drawn: set[int] = set()
        """Generators that the run has drawn from."""
        self._repeated: set[int] = set()
        """Attributes that a layer or its hooks change by themselves, in a replay as in the model."""

    @contextlib.contextmanager
    def watching(self, quiet: Callable[[], int]) -> Iterator[None]:
        """Observe a run; generators of Python and NumPy that belong to the model are put back after it."""
        try:
            with self.reads.watching(quiet):
                yield
        finally:
            for generator, state in self._generators:
                if repr(generator_state(generator)) != repr(state):
                    self._drawn.add(id(generator))
                    _set_state(generator, state)

    def effects(self, ref: Callable[[Any], Any]) -> Effects:
        """What the run has changed; called before the model is put back.

        Args:
            ref: makes the placeholder of a tensor of the run in a template.
        """
        writes: list[ModuleWrite] = []
        lost = [place.description for place, then in self._outer if frozen_at(place) != then]
        places = [*(p for p, _ in self._outer), *(p for _, p, _ in self._attributes)]
        lost += [place.description for place in places if id(place.read()) in self._drawn]
        known = {(id(m), p.name) for m, p, _ in self._attributes}
        for module, place, then in self._attributes:
            if frozen_at(place) == then:
                continue
            if id(module) in self._leaves:
                self._repeated.add(id(place))
            else:
                self._write(module, place.name, ref, writes, lost)
        for module in self.reads.modules:
            if id(module) in self._leaves:
                continue
            for name in sorted(self.reads.written.get(id(module), ())):
                if (id(module), name) not in known and name in module.__dict__:
                    self._write(module, name, ref, writes, lost)
            before = self._buffers[id(module)]
            for name, buffer in module._buffers.items():
                if buffer is not before.get(name, GONE):
                    self._note(module, name, "buffer", buffer, ref, writes, lost)
        hooks: list[ModuleWrite] = []
        for module in self.reads.modules:
            self._note_hooks(module, hooks, lost)
        for key, module in self.reads.strangers.items():
            if key not in self.reads.made and self.reads.written.get(key):
                lost.append(describe_attribute(module, "", sorted(self.reads.written[key])[0]))
        return Effects(tuple(writes), tuple(dict.fromkeys(lost)), tuple(hooks))

    def snapshot(self, constants: Iterable[torch.Tensor]) -> Snapshot:
        """What the run depends on; called when the model is as it was before.

        Args:
            constants: the tensors, beside parameters and buffers, that it computed with.
        """
        known = [(m, p) for m, p, _ in self._attributes if id(p) not in self._repeated]
        found, missing = read_places(self.model, self.reads, known)
        copies = {id(p): then for _, p, then in self._attributes}
        values = [(p, copies[id(p)] if id(p) in copies else frozen_at(p)) for p in found]
        used = frozenset(map(id, constants))
        return Snapshot(self.model, [*values, *((p, GONE) for p in missing), *self._outer], used)

    def _write(self, module: nn.Module, name: str, ref: Any, writes: list[ModuleWrite], lost: list[str]) -> None:
        key = (id(module), name)
        before, after = self.reads.before[id(module)].get(name, GONE), module.__dict__.get(name, GONE)
        if after is GONE:
            self._note(module, name, "delete", None, ref, writes, lost)
            return
        by_hook = after is before and bool(module._forward_hooks or module._forward_pre_hooks)
        set_unseen = after is not before and name not in self.reads.written.get(id(module), ())
        if set_unseen and (module._forward_hooks or module._forward_pre_hooks):
            return  # a hook did it, and a replay calls that
        try:
            if by_hook:
                raise TypeError
            how, value = change_of(before, after, self._contents.get(key))
        except TypeError:
            lost.append(describe_attribute(module, self._paths[id(module)], name))
            return
        self._note(module, name, how, value, ref, writes, lost)

    def _note_hooks(self, module: nn.Module, hooks: list[ModuleWrite], lost: list[str]) -> None:
        """Hooks that were registered in the run."""
        path = self._paths[id(module)]
        told = describe_attribute(module, path, "hooks").removeprefix("self.")
        for name in _hook_tables(module):
            before, now = self._hooks[id(module)].get(name, {}), module.__dict__[name]
            if before == now:
                continue
            if before.keys() <= now.keys():
                new = {key: hook for key, hook in now.items() if key not in before}
                hooks.append(ModuleWrite(path, name, told, "update", new))
            else:
                lost.append(told)

    def _note(
        self, module: nn.Module, name: str, how: Any, value: Any, ref: Any, writes: list[ModuleWrite], lost: list[str]
    ) -> None:
        path = self._paths[id(module)]
        try:
            writes.append(ModuleWrite(path, name, describe_attribute(module, path, name), how, templated(value, ref)))
        except (TypeError, CaptureError):
            lost.append(describe_attribute(module, path, name))

    def _found_generators(self) -> list[Any]:
        values = [v for m in self.reads.modules for v in m.__dict__.values()] + [p.read() for p, _ in self._outer]
        kinds = random.Random | np.random.Generator | np.random.RandomState
        return list({id(v): v for v in values if isinstance(v, kinds)}.values())


def _hook_tables(module: nn.Module) -> list[str]:
    """The attributes in which a module has its hooks, and what is known of each of them."""
    return [name for name in module.__dict__ if "_hooks" in name and isinstance(module.__dict__[name], dict)]


def _content(value: Any) -> Any:
    """A copy of a list or a dictionary; of an object its attributes, each with a frozen copy; else none."""
    if type(value) in (list, dict):
        return type(value)(value)
    if isinstance(value, (torch.Tensor, nn.Module, type)) or (inside := attributes_of(value)) is None:
        return None
    return {name: (entry, frozen(entry)) for name, entry in inside.items()}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
