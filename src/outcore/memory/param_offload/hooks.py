"""Hooks on modules and on gradients.

What a forward computes with must be on the device when it begins. Where parameters pass through a window, a module that
calls others in between holds its own parameters there until it is over. In backward, a gradient that was accumulated
may be the last that an update waits for.
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


class _BeforeForward:
    """Fetches the buckets that a module reads, before its forward."""

    def __init__(
        self, residency: ParamResidency | None = None, buckets: Sequence[Bucket] = (), *, holds: bool = False
    ) -> None:
        self.residency = weakref.ref(residency) if residency is not None else None
        self.buckets, self.holds = tuple(buckets), holds

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Fetch the buckets, and hold them if the module calls others."""
        residency = self.residency() if self.residency is not None else None
        if residency is not None and not residency.hooks_disabled:
            with torch._C.DisableTorchFunction():  # whoever follows the model's calls must not take these for some
                residency.fetch(*self.buckets)
            if self.holds:
                residency.held.update(self.buckets)

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return type(self), ()  # a copied or saved model has no offloaded state


class _AfterForward(_BeforeForward):
    """Lets go of the buckets of a module that called others in between, after its forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Let go of the buckets."""
        residency = self.residency() if self.residency is not None else None
        if residency is not None and not residency.hooks_disabled:
            for bucket in self.buckets:  # a hook installed in the middle of a forward has not seen it begin
                residency.held[bucket] = max(0, residency.held[bucket] - 1)


def hook_modules(residency: ParamResidency, uses: Iterable[Use]) -> list[Any]:
    """Fetch parameters before the modules that read them; returns the handles that remove the hooks."""
    buckets: dict[nn.Module, dict[Bucket, None]] = {}
    for _, module, parameters in uses:
        buckets.setdefault(module, {}).update(dict.fromkeys(residency.bucket_of[id(p)] for p in parameters))
    handles: list[Any] = []
    for module, needed in buckets.items():
        holds = residency.windowed and any(True for _ in module.children())
        handles.append(module.register_forward_pre_hook(_BeforeForward(residency, list(needed), holds=holds)))
        if holds:
            handles.append(module.register_forward_hook(_AfterForward(residency, list(needed)), always_call=True))
    return handles


def _first_uses(residency: ParamResidency, uses: Iterable[Use]) -> list[Use]:
    """The first use of each bucket: later ones find it resident."""
    found: dict[Bucket, Use] = {}
    for call, module, parameters in uses:
        for p in parameters:
            found.setdefault(residency.bucket_of[id(p)], (call, module, [p]))
    return list(found.values())


def hook_gradients(offloader: StateOffloader, *, both: bool) -> tuple[dict[int, Any], list[Any]]:
    """Tell an offloader of gradients that were accumulated, and with `both` of those about to be; returns the first
    hooks by parameter (id), and the handles of the second."""
    reference = weakref.ref(offloader)

    def gradient_ready(p: torch.Tensor) -> None:
        if (found := reference()) is not None and not found.hooks_disabled:
            found.gradient_ready(p)

    def before(number: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if (found := reference()) is not None and not found.hooks_disabled:
                found.before_gradient(found.buckets[number])

        return hook

    after = {
        id(p): p.register_post_accumulate_grad_hook(gradient_ready)
        for bucket in offloader.buckets
        for p in bucket.trained
    }
    handles = [p.register_hook(before(bucket.number)) for bucket in offloader.buckets for p in bucket.trained if both]
    return after, handles


def drop_redundant_hooks(offloader: StateOffloader, last: Iterable[int]) -> None:
    """Keep only the hooks on the last gradient of each bucket (parameters, by id) and before its first use."""
    for other in offloader.hooks.keys() - set(last):
        offloader.hooks.pop(other).remove()
    for p in (p for bucket in offloader.buckets for p in bucket.trained):
        if not p._post_accumulate_grad_hooks:  # backward would ask an empty table for every parameter
            p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    if offloader.policy.parameters == "offload" and not offloader.windowed:
        for hook in offloader.needs:
            hook.remove()
        offloader.needs, offloader.few_hooks = hook_modules(offloader, _first_uses(offloader, offloader.uses)), True
