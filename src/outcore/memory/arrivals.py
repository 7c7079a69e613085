"""Hooks on modules: what a forward computes with must be on the device when it begins.

A module that calls others in between keeps its own parameters there until it is over, where they pass through a window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from outcore.memory.lots import Lot, Use

if TYPE_CHECKING:
    from outcore.memory.traffic import Traffic

__all__ = ["hook_modules"]


class _Arrival:
    """Before a module's forward."""

    def __init__(self, traffic: Traffic | None = None, lots: Sequence[Lot] = (), *, holds: bool = False) -> None:
        self.traffic = weakref.ref(traffic) if traffic is not None else None
        self.lots, self.holds = tuple(lots), holds

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        traffic = self.traffic() if self.traffic is not None else None
        if traffic is not None and not traffic.asleep:
            traffic.need(*self.lots)
            if self.holds:
                traffic.held.update(self.lots)

    def __reduce__(self) -> tuple[type[_Arrival], tuple[()]]:
        return type(self), ()  # a copied or saved model has no state elsewhere


class _Departure(_Arrival):
    """After the forward of a module that called others in between."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """After forward."""
        traffic = self.traffic() if self.traffic is not None else None
        if traffic is not None and not traffic.asleep:
            traffic.held.subtract(self.lots)


def hook_modules(traffic: Traffic, uses: Iterable[Use]) -> list[Any]:
    """Let parameters come before the modules that read them; returns what removes the hooks."""
    lots: dict[nn.Module, dict[Lot, None]] = {}
    for _, module, parameters in uses:
        lots.setdefault(module, {}).update(dict.fromkeys(traffic.of[id(p)] for p in parameters))
    handles: list[Any] = []
    for module, needed in lots.items():
        holds = traffic.windowed and any(True for _ in module.children())
        handles.append(module.register_forward_pre_hook(_Arrival(traffic, list(needed), holds=holds)))
        if holds:
            handles.append(module.register_forward_hook(_Departure(traffic, list(needed)), always_call=True))
    return handles
