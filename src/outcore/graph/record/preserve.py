"""Leaves a model as it was.

Recording runs the user's ``forward`` once. That may set attributes, append to lists, update buffers, draw random
numbers and fill caches (``functools.lru_cache`` around a function that makes position indices). `preserved(model)` puts
all of it back, also after an exception: whatever can be reached from the model's attributes through lists, dicts and
objects whose classes come from the packages that its modules come from, and what its code reaches by name outside of it
(`outcore.graph.record.outer_state`). What a forward writes to files is not undone.

Functions under ``functools.lru_cache`` hold state too (`function_caches`). Python keeps no list of them; finding them
means looking at every object there is, which takes a tenth of a second in a process with a few large libraries. So they
are remembered, weakly, and looked for again only when there are more: each of them holds one reference to its type, so
that the number of references to the type, less those of the known ones alive, is the same until another is made (or
somebody else refers to the type, and the search was for nothing).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.graph.record.contents import CONTAINERS, refill, same_contents, shallow_copy
from outcore.graph.record.outer_state import OuterState

_ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None), torch.Tensor, nn.Parameter, torch.Generator})


@contextlib.contextmanager
def preserved(model: nn.Module, *, contents: bool) -> Iterator[None]:
    """A context that restores the model at its end; with `contents` the data of all tensors, else the caches that may
    hold fake tensors."""
    state = ModelState(model, (*model.parameters(), *state_tensors(model)) if contents else ())
    caches = [] if contents else [(cache, cache.cache_info().misses) for cache in function_caches()]
    try:
        yield
    finally:
        state.restore()
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


@contextlib.contextmanager
def state_restored(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """A context after which attributes, buffers and random states are as before, whatever a run has written; with
    `gradients` those too: the backward of a checkpointed part may add to them where it is only asked for its own."""
    state = ModelState(model, state_tensors(model))
    held = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()] if gradients else []
    try:
        yield
    finally:
        state.restore()
        with torch.no_grad():
            for parameter, gradient, content in held:
                if gradient is not None and content is not None:
                    gradient.copy_(content)
                parameter.grad = gradient


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with every module in eval mode, and back as each was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class ModelState:
    """Attributes and random states of a model, and the numbers in some of its tensors."""

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor], *, outer: bool = True) -> None:
        """
        Args:
            model: what is going to run.
            tensors: those whose numbers it may change.
            outer: whether its own Python runs, which may also change what is outside of it.
        """
        held = [holder for holder in _holders(model) if not isinstance(holder, tuple)]
        self._contents = [(holder, _snapshot(holder)) for holder in held]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        own = (value for holder in held for value in _contents(holder) if isinstance(value, torch.Generator))
        self._generators = [(generator, generator.get_state()) for generator in own]
        self._randomness = RandomStates()
        self._outer = OuterState(model) if outer else None

    def restore(self) -> None:
        """Put it back as it was."""
        if self._outer is not None:
            self._outer.restore()
        for holder, content in self._contents:
            _restore(holder, content)
        with torch.no_grad():
            for tensor, content in self._tensors:
                if not torch.equal(tensor, content):  # its version tells nothing: batch norm writes without raising it
                    tensor.copy_(content)
        for generator, place in self._generators:
            generator.set_state(place)
        self._randomness.restore()


class RandomStates:
    """The states of all generators a model may draw from."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state(legacy=True)
        self.cpu = torch.default_generator.get_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Go back to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def host_drawn(self) -> bool:
        """Whether Python's or NumPy's generator was used since: numbers that no recorded tensor operation draws
        again."""
        now = np.random.get_state(legacy=True)
        same = all(bool(np.all(a == b)) for a, b in zip(self.numpy, now, strict=True))
        return not same or random.getstate() != self.python


def _holders(model: nn.Module) -> Iterator[Any]:
    """The modules, containers and plain objects that can be reached from a model, each once."""
    waiting: list[Any] = list(model.modules())
    packages = {_package(module) for module in waiting} - {"torch", "outcore"}
    seen = {id(holder): holder for holder in waiting}
    while waiting:
        holder = waiting.pop()
        yield holder
        for value in _contents(holder):
            if type(value) not in _ATOMS and id(value) not in seen and _holds(value, packages):
                seen[id(value)] = value
                waiting.append(value)


def _contents(holder: Any) -> Iterable[Any]:
    if isinstance(holder, dict):
        return list(holder.values())
    if isinstance(holder, (list, tuple, set, deque)):
        return list(holder)
    return list(holder.__dict__.values())


def _holds(value: Any, packages: set[str]) -> bool:
    """Whether something has contents that a forward may exchange: a container, or an object of the model's authors."""
    if isinstance(value, (*CONTAINERS, tuple, nn.Module, types.SimpleNamespace)):
        return True
    return hasattr(value, "__dict__") and _package(value) in packages and not isinstance(value, (type, torch.Tensor))


def _package(value: Any) -> str:
    """The package that defines the class of something."""
    return type(value).__module__.partition(".")[0]


def _snapshot(holder: Any) -> Any:
    """A shallow copy of what is in a module, a container or an object."""
    return shallow_copy(holder) if isinstance(holder, CONTAINERS) else dict(holder.__dict__)


def _restore(holder: Any, content: Any) -> None:
    if isinstance(holder, CONTAINERS):
        if not same_contents(holder, content):
            refill(holder, content)
        return
    now = holder.__dict__
    for name in now.keys() - content.keys():
        del now[name]
    now.update(content)


def state_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors a forward pass may write: buffers, and those in plain attributes and what these hold."""
    parameters = {id(p) for p in model.parameters()}
    held = (v for h in _holders(model) for v in _contents(h) if isinstance(v, torch.Tensor) and id(v) not in parameters)
    return list({id(t): t for t in (*model.buffers(), *held) if not t.is_meta}.values())


_Cache = functools._lru_cache_wrapper

_known: list[weakref.ref[_Cache[Any]]] = []
_others = -1
"""References to the type that no known cache holds."""


def function_caches() -> list[_Cache[Any]]:
    """All functions under ``functools.lru_cache``, but for torch's own."""
    global _known, _others
    alive = [cache for ref in _known if (cache := ref()) is not None]
    if not _is_counted() or sys.getrefcount(_Cache) - len(alive) != _others:
        alive = [o for o in gc.get_referrers(_Cache) if type(o) is _Cache]
        _known = [weakref.ref(cache) for cache in alive]
        _others = sys.getrefcount(_Cache) - len(alive)
    return [cache for cache in alive if not str(getattr(cache, "__module__", "")).startswith("torch.")]


def _is_counted() -> bool:
    """Whether a cache adds to the references of its type: not so in a Python without a global lock."""
    before = sys.getrefcount(_Cache)
    cache = functools.lru_cache(_is_counted)
    return sys.getrefcount(_Cache) - before == 1 and cache is not None
