"""Leave a model as it was.

Recording runs the user's ``forward`` once. That may set attributes, append to lists, update buffers, draw random
numbers and fill caches (``functools.lru_cache`` around a function that makes position indices). `preserved(model)` puts
all of it back, also after an exception.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.graph.function_caches import function_caches

__all__ = ["ModelState", "Randomness", "evaluating", "preserved", "state_tensors"]

_CONTAINERS = (list, dict, set, deque)


@contextlib.contextmanager
def preserved(model: nn.Module, *, contents: bool) -> Iterator[None]:
    """Restore the model on leaving; with `contents` all numbers in it, else the caches that may hold fake tensors."""
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back as each was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class ModelState:
    """Attributes and random states of a model, and the numbers in some of its tensors."""

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
        self._attributes = [(module, _snapshot(module)) for module in model.modules()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        own = (
            value for _, kept in self._attributes for value, _ in kept.values() if isinstance(value, torch.Generator)
        )
        self._generators = [(generator, generator.get_state()) for generator in own]
        self._randomness = Randomness()

    def restore(self) -> None:
        """Put it back as it was."""
        for module, state in self._attributes:
            _restore(module, state)
        with torch.no_grad():
            for tensor, content in self._tensors:
                if not torch.equal(tensor, content):  # its version tells nothing: batch norm writes without raising it
                    tensor.copy_(content)
        for generator, place in self._generators:
            generator.set_state(place)
        self._randomness.restore()


class Randomness:
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
        """Whether Python's or NumPy's generator was used since: numbers no recorded tensor operation draws again."""
        now = np.random.get_state(legacy=True)
        same = all(bool(np.all(a == b)) for a, b in zip(self.numpy, now, strict=True))
        return not same or random.getstate() != self.python


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a shallow copy of its content where it is a container."""
    return {
        name: (value, copy.copy(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in module.__dict__.items()
    }


def _restore(module: nn.Module, state: dict[str, tuple[Any, Any]]) -> None:
    for name in module.__dict__.keys() - state.keys():
        del module.__dict__[name]
    for name, (value, content) in state.items():
        module.__dict__[name] = value
        if content is None or _same(value, content):
            continue
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def _same(value: Any, content: Any) -> bool:
    if len(value) != len(content):
        return False
    if isinstance(value, set):
        return bool(value == content)
    pairs = (
        zip(value.items(), content.items(), strict=True)
        if isinstance(value, dict)
        else zip(value, content, strict=True)
    )
    if isinstance(value, dict):
        return all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in pairs)


def state_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors a forward pass may write: buffers and plain attributes."""
    plain = (v for m in model.modules() for v in m.__dict__.values() if isinstance(v, torch.Tensor))
    return list({id(t): t for t in (*model.buffers(), *plain) if not t.is_meta}.values())
