"""Tell whoever watches a thread which modules are called on it.

A `TorchFunctionMode` sees functions on tensors but not calls of modules. While at least one thread is watched,
``nn.Module.__call__`` is a function that asks who watches its own thread; with nobody watching, the attribute is
torch's own again, so that compilers and tracers find what they know. Each thread has at most one watcher at a time: a
managed model inside a managed model replaces the outer one's watcher for as long as it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

__all__ = ["ModuleWatcher", "call_module", "unwatched", "watched"]


class ModuleWatcher(Protocol):
    """Who is told of module calls."""

    def on_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called; returns its result."""


class _Current(threading.local):
    """The watcher of each thread."""

    watcher: ModuleWatcher | None = None


call_module = nn.Module.__call__
"""The call of a module as torch defines it."""
_CURRENT = _Current()
_LOCK = threading.Lock()
_watching = 0
"""Threads that are watched now."""


def current_watcher() -> ModuleWatcher | None:
    """Who watches this thread."""
    return _CURRENT.watcher


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands where ``nn.Module.__call__`` was."""
    watcher = _CURRENT.watcher
    return call_module(module, *args, **kwargs) if watcher is None else watcher.on_module(module, args, kwargs)


def _count(change: int) -> None:
    """Stand at ``nn.Module.__call__`` while anybody is watched, unless somebody else stands there."""
    global _watching
    with _LOCK:
        _watching += change
        here: Any = nn.Module.__call__
        if _watching and here is call_module:
            nn.Module.__call__ = _call  # type: ignore[method-assign]
        elif not _watching and here is _call:
            nn.Module.__call__ = call_module  # type: ignore[method-assign]


@contextlib.contextmanager
def watched(watcher: ModuleWatcher) -> Iterator[None]:
    """Tell a watcher of the module calls on this thread."""
    before, _CURRENT.watcher = _CURRENT.watcher, watcher
    _count(+1)
    try:
        yield
    finally:
        _count(-1)
        _CURRENT.watcher = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Nobody is told of this thread's calls: compiled and scripted code finds torch as it is."""
    before, _CURRENT.watcher = _CURRENT.watcher, None
    _count(-1)
    try:
        yield
    finally:
        _count(+1)
        _CURRENT.watcher = before
