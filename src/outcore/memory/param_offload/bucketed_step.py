"""The optimizer's step, one bucket of parameters at a time.

An optimizer that treats every parameter by itself (`outcore.memory.param_offload.separable`) does the same if it is
shown some of its parameters, then others. So the user's own optimizer is called with its groups narrowed to the
parameters of one bucket; its state for them can be fetched just before and written back just after.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as _all_after
from torch.optim.optimizer import _global_optimizer_pre_hooks as _all_before

from outcore.errors import OutcoreError
from outcore.memory.offload.copy_streams import CopyStreams
from outcore.memory.offload.host_storage import OffDeviceStorage, off_device_storage
from outcore.memory.param_offload.device_window import AllocatorWindow
from outcore.memory.param_offload.flat_buffer import FlatBuffer, lay_out, movable
from outcore.memory.param_offload.separable import separable_step

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def in_parts(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, if its step can be done in parts; raises otherwise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OutcoreError("state is offloaded together with its optimizer: pass it as it is, optimizer=optimizer")
    if (why_not := separable_step(optimizer).why_not) is not None:
        raise OutcoreError(f"{why_not}, so its step cannot be done in parts; keep all state here")
    return optimizer


class BucketedStep(Protocol):
    """What replaces an optimizer's step."""

    stepper: PartialOptimizer

    def step(self) -> None:
        """Do all that is left of the step."""


def bucketed_step_for(offloader: BucketedStep) -> Callable[..., Any]:
    """The function that replaces an optimizer's ``step`` as long as the offloader lives."""
    reference, own, optimizer = weakref.ref(offloader), offloader.stepper.step, offloader.stepper.optimizer

    def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        found = reference()
        if found is None:  # the model is gone
            return own(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with found.stepper.hooked():
            found.step()
        return loss

    return MethodType(step, optimizer)  # schedulers expect a method


class PartialOptimizer:
    """Calls an optimizer for some of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
        self.optimizer, self.step = optimizer, step
        """The optimizer's own step, whatever it was wrapped in."""
        self._bare = _bare(optimizer, step)
        self._parts: dict[int, tuple[tuple[nn.Parameter, ...], list[list[nn.Parameter]]]] = {}
        """Id of a tuple of parameters that was updated before -> that tuple, and what each group has of it, as long as
        the groups stay the same."""
        self._whole: list[list[nn.Parameter]] = []
        self._ids: list[list[int]] = []

    def run(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Update these parameters, as far as they have gradients; a tuple that was given before is recognised by its
        id."""
        whole = [group["params"] for group in self.optimizer.param_groups]
        if (ids := [[*map(id, params)] for params in whole]) != self._ids:
            self._parts, self._whole, self._ids = {}, [list(params) for params in whole], ids
        if (known := self._parts.get(id(parameters))) is None:
            wanted = {id(p) for p in parameters}
            parts = [[p for p in params if id(p) in wanted] for params in whole]
            known = self._parts[id(parameters)] = parameters, parts
        self._narrowed(known[1])

    def update_others(self, done: Collection[int]) -> None:
        """Update all parameters but these (ids)."""
        groups = self.optimizer.param_groups
        if left := {id(p) for group in groups for p in group["params"] if id(p) not in done}:
            self._narrowed([[p for p in group["params"] if id(p) in left] for group in groups])

    def _narrowed(self, parts: Sequence[list[nn.Parameter]]) -> None:
        """Run the optimizer's step with these parameters of each group."""
        optimizer: Any = self.optimizer
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        hooks = {name: optimizer.__dict__[name] for name in _HOOKS}
        try:
            optimizer.__dict__.update({name: {} for name in _HOOKS})  # `hooked` calls them, once for the whole step
            for group, params in zip(groups, parts, strict=True):
                group["params"] = params
            optimizer.param_groups = [group for group in groups if group["params"]]
            if optimizer.param_groups:
                (self._bare or self.step)()
        finally:
            optimizer.__dict__.update(hooks)
            optimizer.param_groups = groups
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Call the hooks on the optimizer's step once around a whole step."""
        before, after = (tuple(self.optimizer.__dict__[name].values()) for name in _HOOKS)
        if self._bare is not None:  # and the global ones, which torch's wrapper would have called
            before, after = (*_all_before.values(), *before), (*after, *_all_after.values())
        for hook in before:
            hook(self.optimizer, (), {})
        yield
        for hook in after:
            hook(self.optimizer, (), {})

    def settings(self) -> list[dict[str, Any]]:
        """The options of each parameter group."""
        return [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def refuse_changes(self, before: list[dict[str, Any]] | None) -> None:
        """Raise if the settings differ from those that parameters were updated with in backward."""
        if before is not None and repr(before) != repr(self.settings()):
            raise OutcoreError(
                "the optimizer's settings changed between backward() and step(), after the parameters were updated in "
                'backward; change them after step(), or use update="step"'
            )

    def tensors(self, parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """The optimizer's state tensors of parameters, as far as they have the size of their parameter."""
        found = []
        for p in parameters:
            state = self.optimizer.state.get(p, {})
            found += [t for t in state.values() if isinstance(t, torch.Tensor) and t.numel() == p.numel() > 1]
        return found


def _bare(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[..., Any] | None:
    """The step without what torch wraps it in for hooks and profilers, which takes the host as long as a third of a
    small step; None where somebody else has wrapped it too."""
    outer: Any = type(optimizer).step
    inner = getattr(outer, "__wrapped__", None) if getattr(outer, "hooked", False) else None
    if inner is None or getattr(step, "__func__", None) is not outer:
        return None
    return MethodType(inner, optimizer)


class StateCopies:
    """Optimizer state that lives off the device and is fetched for the update."""

    def __init__(self, stepper: PartialOptimizer, device: torch.device, copy_streams: CopyStreams) -> None:
        self.stepper, self.device, self.copy_streams = stepper, device, copy_streams
        self.flat_buffers: dict[int, FlatBuffer] = {}
        """By the number of the bucket."""
        self.storages: dict[int, OffDeviceStorage] = {}
        self.window = AllocatorWindow(device, copy_streams)

    def prefetch(self, number: int) -> None:
        """Start to fetch the state of a bucket."""
        if (flat_buffer := self.flat_buffers.get(number)) is not None:
            flat_buffer.prefetch()

    def make_resident(self, number: int, parameters: Collection[nn.Parameter]) -> None:
        """Have the state of a bucket on the device, if there is any yet."""
        tensors = self.stepper.tensors(parameters)
        flat_buffer = self.flat_buffers.get(number)
        if flat_buffer is not None and [id(m.tensor) for m in flat_buffer.members] != [id(t) for t in tensors]:
            self.forget(number)  # another state was loaded
            flat_buffer = None
        if flat_buffer is None:
            for tensor in tensors:
                if tensor.device != self.device:
                    tensor.data = tensor.data.to(self.device)
            return
        flat_buffer.prefetch()
        flat_buffer.make_resident()

    def write_back(self, number: int, parameters: Collection[nn.Parameter]) -> None:
        """Offload the state of a bucket after its update."""
        flat_buffer = self.flat_buffers.get(number)
        if flat_buffer is None:
            tensors = self.stepper.tensors(parameters)
            if not tensors or not all(movable(t) for t in tensors):
                return
            ((members, size),) = lay_out(tensors, 2**62)
            storage = self.storages[number] = off_device_storage(self.device, size)
            flat_buffer = self.flat_buffers[number] = FlatBuffer(
                f"state {number}", members, storage.memory, self.window, self.copy_streams
            )
            flat_buffer.rebind()
            return
        flat_buffer.write_back()
        flat_buffer.evict()

    def forget(self, number: int) -> None:
        """Stop managing the state of a bucket; its tensors are ordinary ones again."""
        flat_buffer = self.flat_buffers.pop(number, None)
        if flat_buffer is not None:
            flat_buffer.evict()
            flat_buffer.synchronize()
            self.storages.pop(number)

    def synchronize(self) -> None:
        """Let the host wait until all state is written back, and drop the device memory it was copied from."""
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.synchronize()
        self.window.tidy()

    def close(self) -> None:
        """Move all state back to the device, as ordinary tensors."""
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.evict()
            flat_buffer.synchronize()
            for member in flat_buffer.members:
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
        for storage in self.storages.values():
            storage.close()
        self.flat_buffers, self.storages = {}, {}
