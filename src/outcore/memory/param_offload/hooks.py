"""Hooks on modules and on gradients.

What a forward computes with must be on the device when it begins. A module that calls others in between keeps its own
parameters there until it is over, where they pass through a window. And in backward a gradient that arrives may be the
last that an update waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outcore.memory.param_offload.buckets import Bucket, Use

if TYPE_CHECKING:
    from outcore.memory.param_offload.offloader import StateOffloader
    from outcore.memory.param_offload.residency import ParamResidency

__all__ = ["hook_gradients", "hook_modules", "thin_out"]


class _Arrival:
    """Before a module's forward."""

    def __init__(
        self, traffic: ParamResidency | None = None, buckets: Sequence[Bucket] = (), *, holds: bool = False
    ) -> None:
        self.traffic = weakref.ref(traffic) if traffic is not None else None
        self.buckets, self.holds = tuple(buckets), holds

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before forward."""
        traffic = self.traffic() if self.traffic is not None else None
        if traffic is not None and not traffic.asleep:
            traffic.need(*self.buckets)
            if self.holds:
                traffic.held.update(self.buckets)

    def __reduce__(self) -> tuple[type[_Arrival], tuple[()]]:
        return type(self), ()  # a copied or saved model has no state elsewhere


class _Departure(_Arrival):
    """After the forward of a module that called others in between."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """After forward."""
        traffic = self.traffic() if self.traffic is not None else None
        if traffic is not None and not traffic.asleep:
            for bucket in self.buckets:  # who has come in the middle of a forward has not seen it begin
                traffic.held[bucket] = max(0, traffic.held[bucket] - 1)


def hook_modules(traffic: ParamResidency, uses: Iterable[Use]) -> list[Any]:
    """Let parameters come before the modules that read them; returns what removes the hooks."""
    buckets: dict[nn.Module, dict[Bucket, None]] = {}
    for _, module, parameters in uses:
        buckets.setdefault(module, {}).update(dict.fromkeys(traffic.of[id(p)] for p in parameters))
    handles: list[Any] = []
    for module, needed in buckets.items():
        holds = traffic.windowed and any(True for _ in module.children())
        handles.append(module.register_forward_pre_hook(_Arrival(traffic, list(needed), holds=holds)))
        if holds:
            handles.append(module.register_forward_hook(_Departure(traffic, list(needed)), always_call=True))
    return handles


def _first_uses(traffic: ParamResidency, uses: Iterable[Use]) -> list[Use]:
    """The first use of each bucket: whoever comes later finds it here."""
    found: dict[Bucket, Use] = {}
    for call, module, parameters in uses:
        for p in parameters:
            found.setdefault(traffic.of[id(p)], (call, module, [p]))
    return list(found.values())


def hook_gradients(keeper: StateOffloader, *, both: bool) -> tuple[dict[int, Any], list[Any]]:
    """Tell a keeper of gradients that have arrived, by parameter (id), and on request of those about to."""
    reference = weakref.ref(keeper)

    def arrived(p: torch.Tensor) -> None:
        if (found := reference()) is not None and not found.asleep:
            found.arrived(p)

    def before(number: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if (found := reference()) is not None and not found.asleep:
                found.arriving(found.buckets[number])

        return hook

    after = {id(p): p.register_post_accumulate_grad_hook(arrived) for bucket in keeper.buckets for p in bucket.trained}
    handles = [p.register_hook(before(bucket.number)) for bucket in keeper.buckets for p in bucket.trained if both]
    return after, handles


def thin_out(keeper: StateOffloader, last: Iterable[int]) -> None:
    """From now on only the last gradient of each bucket (parameters, by id) is of interest, and its first use."""
    for other in keeper.hooks.keys() - set(last):
        keeper.hooks.pop(other).remove()
    for p in (p for bucket in keeper.buckets for p in bucket.trained):
        if not p._post_accumulate_grad_hooks:  # backward would ask an empty table for every parameter
            p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    if keeper.policy.parameters == "offload" and not keeper.windowed:
        for hook in keeper.needs:
            hook.remove()
        keeper.needs, keeper.thin = hook_modules(keeper, _first_uses(keeper, keeper.uses)), True
