"""Tell whoever watches a thread which modules are called on it.

A `TorchFunctionMode` sees functions on tensors but not calls of modules. So ``nn.Module.__call__`` becomes a function
that asks who watches its own thread, and is torch's own for all others. It is put there when a model first runs under a
plan and stays: changing an attribute of ``nn.Module`` makes Python forget what it has cached of every class of modules,
which costs more than the forward of a small network. A compiler that traces it goes straight to torch's own.

Each thread has at most one watcher at a time: a managed model inside a managed model replaces the outer one's watcher
for as long as it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

__all__ = ["ModuleWatcher", "call_module", "current_watcher", "unwatched", "watched"]


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
