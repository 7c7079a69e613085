"""Observe calls that torch does not announce.

A `TorchFunctionMode` sees functions on tensors, but not calls of modules, custom autograd functions and checkpointed
regions. All three pass through one attribute each that torch looks up at the time of the call; these are patched while
recording, on the recording thread only:

- ``nn.Module.__call__``;
- ``_SingleLevelFunction.apply``, which every ``MyFunction.apply`` ends in, also one bound to a name long ago;
- the undecorated ``torch.utils.checkpoint.checkpoint``, which keeps its dynamo-free self in an attribute.

Python-level composites of torch.nn.functional (multi-head attention) hand themselves to the mode before doing anything;
`opened` lets them run so that their primitives are seen instead.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import _SingleLevelFunction

__all__ = ["CallObserver", "intercepted", "is_recording", "opened"]


class CallObserver(Protocol):
    """Receives the calls."""

    def on_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a module; returns the result."""

    def on_opaque(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        name: str,
    ) -> Any:
        """Handle a call of a part that must stay whole; `run` does what it does to shapes; returns the result."""


@contextlib.contextmanager
def intercepted(observer: CallObserver) -> Iterator[None]:
    """A context in which the observer receives the calls made on this thread."""
    thread = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == thread

    before, _THREAD.recording = _THREAD.recording, True
    try:
        with _module_calls(observer, here), _autograd_functions(observer, here), _checkpoints(observer, here):
            yield
    finally:
        _THREAD.recording = before


class _Thread(threading.local):
    recording = False


_THREAD = _Thread()


def is_recording() -> bool:
    """Whether a model is being recorded on this thread."""
    return _THREAD.recording


call_module = nn.Module.__call__
"""The call of a module as torch defines it."""


@contextlib.contextmanager
def _module_calls(observer: CallObserver, here: Callable[[], bool]) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return observer.on_module(module, args, kwargs) if here() else original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _autograd_functions(observer: CallObserver, here: Callable[[], bool]) -> Iterator[None]:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

        return observer.on_opaque(cls.apply, args, kwargs, run, cls.__name__) if here() else run()

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


@contextlib.contextmanager
def _checkpoints(observer: CallObserver, here: Callable[[], bool]) -> Iterator[None]:
    public = torch.utils.checkpoint.checkpoint
    inner: Any = inspect.unwrap(public)
    slot = "__dynamo_disable"
    before = getattr(inner, slot, None)
    own = {p.name for p in inspect.signature(inner).parameters.values() if p.kind is p.KEYWORD_ONLY} | {
        "preserve_rng_state"
    }

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not here():
            return (before or inner)(function, *args, **kwargs)

        def run() -> Any:
            return function(*args, **{k: v for k, v in kwargs.items() if k not in own})

        return observer.on_opaque(public, (function, *args), kwargs, run, "checkpoint")

    setattr(inner, slot, checkpoint)
    try:
        yield
    finally:
        if before is None:
            delattr(inner, slot)
        else:
            setattr(inner, slot, before)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Let a composite function of torch.nn.functional run instead of handing itself to the mode again."""
    functional: Any = F
    original = functional.has_torch_function
    functional.has_torch_function = lambda _: False
    try:
        yield
    finally:
        functional.has_torch_function = original
