"""The optimizer's step, a few parameters at a time.

An optimizer that treats every parameter by itself (all of torch's but LBFGS) does the same if it is shown some of its
parameters, then others. So the user's own optimizer is called, with its groups narrowed to the parameters whose turn
it is; its state for them can be brought to the device just before, and taken away just after.
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
from outcore.memory.offload.host_storage import OffDeviceStorage, home_for
from outcore.memory.param_offload.device_window import AllocatorWindow
from outcore.memory.param_offload.flat_buffer import FlatBuffer, lay_out, movable

__all__ = ["PartialOptimizer", "StateCopies", "can_be_parted", "in_parts", "stepping_for"]


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def in_parts(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, if its step can be done in parts."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OutcoreError("state is offloaded together with its optimizer: pass it as it is, optimizer=optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OutcoreError(
            "LBFGS looks at all parameters at once, so its step cannot be done in parts; keep all state here"
        )
    return optimizer


def can_be_parted(optimizer: Any) -> bool:
    """Whether an optimizer was given whose step can be done in parts."""
    return isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


class BucketedStep(Protocol):
    """Does an optimizer's step in its place."""

    stepper: PartialOptimizer

    def step(self) -> None:
        """All that is left to do."""


def stepping_for(keeper: BucketedStep) -> Callable[..., Any]:
    """What an optimizer's ``step`` becomes, as long as the keeper lives."""
    reference, own, optimizer = weakref.ref(keeper), keeper.stepper.step, keeper.stepper.optimizer

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
        """By who were updated before (their id), what each group has of them, as long as the groups are the same."""
        self._whole: list[list[nn.Parameter]] = []
        self._ids: list[list[int]] = []

    def run(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Update these parameters, as far as they have gradients; a tuple that comes again is known by its id."""
        whole = [group["params"] for group in self.optimizer.param_groups]
        if (ids := [[*map(id, params)] for params in whole]) != self._ids:
            self._parts, self._whole, self._ids = {}, [list(params) for params in whole], ids
        if (known := self._parts.get(id(parameters))) is None:
            wanted = {id(p) for p in parameters}
            parts = [[p for p in params if id(p) in wanted] for params in whole]
            known = self._parts[id(parameters)] = parameters, parts
        self._narrowed(known[1])

    def rest(self, done: Collection[int]) -> None:
        """Update all parameters but these (ids)."""
        groups = self.optimizer.param_groups
        if left := {id(p) for group in groups for p in group["params"] if id(p) not in done}:
            self._narrowed([[p for p in group["params"] if id(p) in left] for group in groups])

    def _narrowed(self, parts: Sequence[list[nn.Parameter]]) -> None:
        """The optimizer's step with some of the parameters of each group."""
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
        """Call the hooks on the optimizer's step around a whole step."""
        before, after = (tuple(self.optimizer.__dict__[name].values()) for name in _HOOKS)
        if self._bare is not None:  # and those on everybody's, which nobody else does then
            before, after = (*_all_before.values(), *before), (*after, *_all_after.values())
        for hook in before:
            hook(self.optimizer, (), {})
        yield
        for hook in after:
            hook(self.optimizer, (), {})

    def settings(self) -> list[dict[str, Any]]:
        """What the groups say beside their parameters."""
        return [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def refuse_changes(self, before: list[dict[str, Any]] | None) -> None:
        """Refuse settings other than those that parameters were updated with in backward."""
        if before is not None and repr(before) != repr(self.settings()):
            raise OutcoreError(
                "the optimizer's settings changed between backward() and step(), after the parameters were updated in "
                'backward; change them after step(), or use update="step"'
            )

    def tensors(self, parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """The state of parameters, as far as it is as large as they are."""
        found = []
        for p in parameters:
            state = self.optimizer.state.get(p, {})
            found += [t for t in state.values() if isinstance(t, torch.Tensor) and t.numel() == p.numel() > 1]
        return found


def _bare(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[..., Any] | None:
    """The step without what torch puts around it for hooks and profilers, which takes the host as long as a third of a
    small step; None where somebody else has wrapped it too."""
    outer: Any = type(optimizer).step
    inner = getattr(outer, "__wrapped__", None) if getattr(outer, "hooked", False) else None
    if inner is None or getattr(step, "__func__", None) is not outer:
        return None
    return MethodType(inner, optimizer)


class StateCopies:
    """State that lives at home and visits the device for the update."""

    def __init__(self, stepper: PartialOptimizer, device: torch.device, copy_streams: CopyStreams) -> None:
        self.stepper, self.device, self.copy_streams = stepper, device, copy_streams
        self.flat_buffers: dict[int, FlatBuffer] = {}
        """By the bucket's number."""
        self.homes: dict[int, OffDeviceStorage] = {}
        self.stage = AllocatorWindow(device, copy_streams)

    def book(self, number: int) -> None:
        """Start to bring the state of a bucket."""
        if (flat_buffer := self.flat_buffers.get(number)) is not None:
            flat_buffer.book()

    def arrive(self, number: int, parameters: Collection[nn.Parameter]) -> None:
        """The state of a bucket is here, if it has any yet."""
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
        flat_buffer.book()
        flat_buffer.arrive()

    def leave(self, number: int, parameters: Collection[nn.Parameter]) -> None:
        """The update is over: the state goes home."""
        flat_buffer = self.flat_buffers.get(number)
        if flat_buffer is None:
            tensors = self.stepper.tensors(parameters)
            if not tensors or not all(movable(t) for t in tensors):
                return
            ((members, size),) = lay_out(tensors, 2**62)
            home = self.homes[number] = home_for(self.device, size)
            flat_buffer = self.flat_buffers[number] = FlatBuffer(
                f"state {number}", members, home.memory, self.stage, self.copy_streams
            )
            flat_buffer.adopt()
            return
        flat_buffer.send()
        flat_buffer.depart()

    def forget(self, number: int) -> None:
        """The bucket's state is an ordinary one."""
        flat_buffer = self.flat_buffers.pop(number, None)
        if flat_buffer is not None:
            flat_buffer.depart()
            flat_buffer.settle()
            self.homes.pop(number)

    def settle(self) -> None:
        """The host waits until everything is at home; what it was copied from is free."""
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.settle()
        self.stage.tidy()

    def close(self) -> None:
        """All state is on the device again, as ordinary tensors."""
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.depart()
            flat_buffer.settle()
            for member in flat_buffer.members:
                member.tensor.data = member.tensor.data.to(self.device, copy=True)
        for home in self.homes.values():
            home.close()
        self.flat_buffers, self.homes = {}, {}
