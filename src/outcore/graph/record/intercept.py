"""Observe calls that torch does not announce.

A `TorchFunctionMode` sees functions on tensors, but not calls of modules, custom autograd functions and checkpointed
regions. All three pass through one attribute each that torch looks up at the time of the call; these are patched while
recording, on the recording thread only:

- ``nn.Module.__call__``;
- ``_SingleLevelFunction.apply``, which every ``MyFunction.apply`` ends in, also one bound to a name long ago;
- the undecorated ``torch.utils.checkpoint.checkpoint``, which keeps its dynamo-free self in an attribute.

Python-level composites of torch.nn.functional (multi-head attention) hand themselves to the mode before doing anything;
`opened` lets them run so that their primitives are seen instead.

A model that runs under a plan is seen in every step (`watched`). For that ``nn.Module.__call__`` becomes a function
that asks who watches its own thread, and is torch's own for all others. It is put there when a model first runs under a
plan and stays: changing an attribute of ``nn.Module`` makes Python forget what it has cached of every class of modules,
which costs more than the forward of a small network. A compiler that traces it goes straight to torch's own. Each
thread has at most one watcher at a time: a managed model inside a managed model replaces the outer one's watcher for as
long as it runs.
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
from torch.compiler import is_dynamo_compiling


class ModuleWatcher(Protocol):
    """Who is told of module calls."""

    def on_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called; returns its result."""


class CallObserver(ModuleWatcher, Protocol):
    """Who is told of all three kinds of calls."""

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


class _Current(threading.local):
    """The watcher of each thread."""

    watcher: ModuleWatcher | None = None


_CURRENT = _Current()


def current_watcher() -> ModuleWatcher | None:
    """Who watches this thread."""
    return _CURRENT.watcher


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands where ``nn.Module.__call__`` was."""
    if is_dynamo_compiling():  # a compiler goes on with the model's own code
        return call_module(module, *args, **kwargs)
    watcher = _CURRENT.watcher
    return call_module(module, *args, **kwargs) if watcher is None else watcher.on_module(module, args, kwargs)


@contextlib.contextmanager
def watched(watcher: ModuleWatcher) -> Iterator[None]:
    """Tell a watcher of the module calls on this thread."""
    if nn.Module.__call__ is call_module:
        nn.Module.__call__ = _call  # type: ignore[method-assign]
        with contextlib.suppress(AttributeError):  # it is compiled as part of what calls it, as torch's own is
            frames: Any = torch._C._dynamo.eval_frame
            alone = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
            frames.set_code_exec_strategy(_call.__code__, alone)
    before, _CURRENT.watcher = _CURRENT.watcher, watcher
    try:
        yield
    finally:
        _CURRENT.watcher = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Nobody is told of this thread's calls."""
    before, _CURRENT.watcher = _CURRENT.watcher, None
    try:
        yield
    finally:
        _CURRENT.watcher = before
