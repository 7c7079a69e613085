"""When Python lets go of each tensor of a run.

A tensor is not free when its last reader has run: a variable of ``forward``, a list of skips, the arguments of a module
that is still running or an attribute of the model may hold it for longer, and its memory with it. What a recording says
about lifetimes has to come from the run itself, so every tensor of it is watched by a weak reference, and the number of
calls that have run is noted when the tensor dies.

Two others would hold tensors beside the user's code, and do not here. The recorder knows tensors by identity and keeps
their storages, not the tensors. Autograd keeps what backward needs, which is counted elsewhere
(`outcore.cost.saved`); under `unheld`, it keeps an alias in place of the tensor itself.

A view keeps its base alive, so of all tensors in one memory the last to die says when the memory is free.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from outcore.graph.parts import OUTLIVES, Call

_autograd: Any = torch._C._autograd


@contextlib.contextmanager
def unheld() -> Iterator[None]:
    """A context in which autograd saves an alias of each tensor, so that it holds no tensor that Python may hold.

    Not under a ``torch.func`` transform, which refuses hooks on saved tensors: nothing there is watched.
    """
    if torch._C._are_functorch_transforms_active():
        yield
        return
    _autograd._push_saved_tensors_default_hooks(_alias, _same)
    try:
        yield
    finally:
        _autograd._pop_saved_tensors_default_hooks()


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class References:
    """The tensors of a run, and after how many calls each of them died."""

    def __init__(self, calls: Callable[[], int], gone: Callable[[int], object]) -> None:
        """Watch nothing yet.

        Args:
            calls: how many calls have run.
            gone: told the identity of a tensor that has died; another may have it from now on.
        """
        self._calls, self._gone = calls, gone
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._died: dict[str, int] = {}

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Note when a tensor dies; it may have had another name before."""
        key = id(tensor)
        known = self._watched.get(key)
        self._watched[key] = (known[0] if known is not None else weakref.ref(tensor, self._on_death(key)), name)

    def living(self) -> dict[str, torch.Tensor]:
        """The tensors that are still there, by name."""
        found = ((name, ref()) for ref, name in self._watched.values())
        return {name: tensor for name, tensor in found if tensor is not None}

    def _on_death(self, key: int) -> Callable[[object], None]:
        def died(_: object) -> None:
            _, name = self._watched.pop(key)
            self._died[name] = self._calls()
            self._gone(key)

        return died

    def held_until(self, calls: Mapping[str, Call]) -> dict[str, str]:
        """Asked when the run is over, for each value that is held beyond its last use: the last call that runs while
        it is held, or `OUTLIVES` where it still is."""
        order = list(calls)
        used = {value: i for i, call in enumerate(calls.values()) for value in (*call.inputs, *call.outputs)}
        found = {name: order[after - 1] for name, after in self._died.items() if after - 1 > used.get(name, -1)}
        return found | {name: OUTLIVES for _, name in self._watched.values()}
