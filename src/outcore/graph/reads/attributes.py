"""Which attributes of modules a run reads and writes.

Every attribute of a module is looked up and set through two methods of ``nn.Module``'s class, which are patched while a
model is recorded, on the recording thread only. An attribute counts as read if it had the value from before the run
when it was asked for: what ``forward`` sets itself and then uses depends on nothing outside. A name that was asked for
and not found counts too (``hasattr``), and a look at the whole ``__dict__`` counts as reading all of it.

What happens inside a call that a replay repeats as a whole (layers of torch.nn, hooks, custom autograd functions) is
repeated with the attributes of then, and is not recorded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.graph.reads.frozen import GONE, SameObject, frozen

BOOKKEEPING = frozenset({*nn.Module().__dict__, "forward", "call_super_init", "_compiled_call_impl"})
"""Attributes in which torch keeps parameters, submodules, hooks and modes, which are compared by themselves."""
_TORCH = str(Path(torch.__file__).parent) + os.sep


class AttributeReads:
    """What a run of a model has read and written of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.before = {id(m): dict(m.__dict__) for m in self.modules}
        """Attributes before the run."""
        self.read: dict[int, set[str]] = {}
        self.written: dict[int, set[str]] = {}
        self.whole: set[int] = set()
        """Modules whose attributes were all looked at."""
        self.strangers: dict[int, nn.Module] = {}
        """Modules that are not part of the model."""
        self.made: set[int] = set()
        """Those of them that the run itself has made."""

    @contextlib.contextmanager
    def watching(self, quiet: Callable[[], int]) -> Iterator[None]:
        """Record what is read and written on this thread, unless `quiet()`."""
        thread, get_ident = threading.get_ident(), threading.get_ident
        plain, assign, remove = object.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__
        outer = nn.Module.__dict__.get("__getattribute__")
        before, read = self.before, self.read

        def get(module: nn.Module, name: str) -> Any:
            if name not in BOOKKEEPING and get_ident() == thread and not quiet():
                if name == "__dict__":
                    if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                        self.whole.add(id(module))
                elif not name.startswith("__"):
                    known = before.get(id(module))
                    if known is None:
                        known = self._stranger(module)
                    if plain(module, "__dict__").get(name, GONE) is known.get(name, GONE):
                        read.setdefault(id(module), set()).add(name)
            return plain(module, name)

        def note(module: nn.Module, name: str) -> None:
            if get_ident() == thread and not quiet():
                if id(module) not in before:
                    known = self._stranger(module)
                    if known.keys() <= BOOKKEEPING:
                        self.made.add(id(module))
                self.written.setdefault(id(module), set()).add(name)

        def put(module: nn.Module, name: str, value: Any) -> None:
            note(module, name)
            assign(module, name, value)

        def drop(module: nn.Module, name: str) -> None:
            note(module, name)
            remove(module, name)

        nn.Module.__getattribute__ = get  # type: ignore[assignment, method-assign]
        nn.Module.__setattr__ = put  # type: ignore[assignment, method-assign]
        nn.Module.__delattr__ = drop  # type: ignore[method-assign]
        try:
            yield
        finally:
            if outer is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = outer  # type: ignore[method-assign]
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            nn.Module.__delattr__ = remove  # type: ignore[method-assign]

    def _stranger(self, module: nn.Module) -> dict[str, Any]:
        """Note a module that the model does not own; its present state is taken as that before the run."""
        self.strangers[id(module)] = module
        self.before[id(module)] = dict(object.__getattribute__(module, "__dict__"))
        return self.before[id(module)]


def copy_attributes(model: nn.Module, other: nn.Module) -> None:
    """Give another model of the same architecture the plain attributes of this one, where they differ."""
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        for name, value in mine.__dict__.items():
            if name in BOOKKEEPING or name.startswith("_flat_weight"):
                continue
            copy = frozen(value)
            if (
                not isinstance(copy, SameObject)
                and copy != frozen(theirs.__dict__.get(name))
                and not _holds_identity(copy)
            ):
                theirs.__dict__[name] = value


def _holds_identity(copy: Any) -> bool:
    """Whether a frozen value has tensors, modules or other objects in it that belong to one model."""
    if isinstance(copy, SameObject):
        return True
    return isinstance(copy, tuple | frozenset) and any(map(_holds_identity, copy))
