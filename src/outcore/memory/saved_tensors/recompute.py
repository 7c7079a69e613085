"""A call as it was in this step, held so that it can run once more in backward.

Nothing is taken from a recording: what is held are this step's own function or module, arguments, autocast modes and
random state. A tensor among the arguments is held in one of three ways: as a view of a buffer that is managed itself
(which then may be away, and comes back when it is asked for), as the memory that the call is about to write, or as it
is. Parameters are held by their memory, so that a parameter whose ``data`` is exchanged before backward does no harm;
a module is held as a copy of its attributes, so that a flag, a probability or a hook that changes later does none.
Settings of the process that decide which numbers torch computes are those of the call, too.

What is written in place between forward and backward is noticed by its version and refused, as autograd does; small
tensors that are neither parameters nor what the model was given are held as copies, because these are often what a
model or a loop keeps up to date (running means, centres, counters), which is no matter to autograd.

A call is repeated only if its operation is known to give the same numbers again (`outcore.ops.recompute_encode`).
Layers that keep statistics normalise again without touching them; those that use their running statistics keep the ones
of this step, because torch writes these without counting it. Random ones draw the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from outcore.graph.record.numeric_settings import numeric_settings, under_settings
from outcore.graph.structure import leaves
from outcore.memory.replay.replay_buffer import Geometry, is_lazy_view, over, raw
from outcore.memory.replay.replay_recompute import (
    NormAgain,
    States,
    batch_norm_again,
    generator_states,
    generators_at,
    instance_norm_again,
    under_autocast,
)
from outcore.memory.saved_tensors.layer_functions import function_of
from outcore.ops.recompute_encode import ATOMS, FOLDING, again

if TYPE_CHECKING:
    from outcore.memory.param_offload.residency import ParamResidency
    from outcore.memory.replay.replay_buffer import ReplayBuffer

_FROM_HOST = {"tensor", "as_tensor"}
"""What they read may be changed by its owner."""
_NORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "batch_norm": (F.batch_norm, batch_norm_again),
    "instance_norm": (F.instance_norm, instance_norm_again),
}
_DEVICES = ("cpu", "cuda")
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_new: Callable[..., Any] = tuple.__new__
"""Makes a named tuple without calling Python."""
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_SMALL = 2**18
"""Bytes up to which a tensor is copied that may be state of the model."""


class NotRepeatable(Exception):  # noqa: N818 - a signal inside this package, never shown
    """A call has an argument that cannot be held."""


class Argument(NamedTuple):
    """A tensor among the arguments of a call."""

    address: int
    """Of its storage."""
    cell: ReplayBuffer | None
    """The managed buffer that it is a view of, if it is one."""
    geometry: Geometry | None
    own: bool
    """It is what the call writes into."""
    parameter: bool
    tensor: torch.Tensor | None
    """As it is, where it is in no managed buffer."""
    trained: bool
    version: int

    def value(self, memory: torch.Tensor | None) -> torch.Tensor:
        """The tensor, for running the call again; `memory` is what the call writes into."""
        _, cell, geometry, _, _, tensor, _, version = self
        if cell is not None:
            return cell.view(geometry, version)  # type: ignore[arg-type]
        if tensor is not None:
            return tensor.detach()
        assert geometry is not None and memory is not None
        dtype, size, stride, offset = geometry
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, size, stride)

    def refuse(self) -> NoReturn:
        """Raise the error for an argument that was written in place between forward and backward."""
        assert self.tensor is not None
        raise RuntimeError(
            f"a tensor of {list(self.tensor.shape)} was modified by an inplace operation between forward and "
            "backward, and outcore makes a value that backward needs from it; modify a copy, or exclude that value "
            "with plan={name: 'keep'}"
        )


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; tensors of inference mode do not count it."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class RecordedCall:
    """One call, to be run again without autograd."""

    __slots__ = ("args", "arguments", "autocast", "folds", "kwargs", "nested", "settings", "states", "target")

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        arguments: Sequence[Argument],
        folds: bool,
        states: States | None,
        nested: bool,
    ) -> None:
        self.target, self.args, self.kwargs, self.arguments = target, args, kwargs, arguments
        self.folds, self.states = folds, states
        self.nested = nested or folds or bool(kwargs)
        """Whether tensors stand elsewhere than among the arguments, or are to require gradients."""
        self.autocast = _autocast_modes() if _any_autocast() else ()
        self.settings = numeric_settings()

    def run(self, memory: torch.Tensor | None = None, traffic: ParamResidency | None = None) -> Any:
        """Run it again; returns what it returns, without autograd.

        Args:
            memory: what it writes into, where it writes in place.
            traffic: whoever brings parameters that are not on the device.
        """
        if traffic is not None:
            buckets = (traffic.bucket_of.get(id(a.tensor)) for a in self.arguments if a.tensor is not None)
            traffic.fetch(*dict.fromkeys(bucket for bucket in buckets if bucket is not None), backward=True)
        for argument in self.arguments:  # parameters of a layer are among them, though not among what it is given
            if argument.tensor is not None and version_of(argument.tensor) != argument.version:
                argument.refuse()
        if self.nested:
            args = [self._filled(a, memory) for a in self.args]
            kwargs = {k: self._filled(v, memory) for k, v in self.kwargs.items()}
        else:
            args, kwargs = [a.value(memory) if type(a) is Argument else a for a in self.args], {}
        changed = self.settings != numeric_settings()
        plain = not (changed or self.states or self.autocast or _any_autocast())
        if plain:  # what follows takes longer than a small operation
            if torch.is_grad_enabled() is self.folds:
                return self.target(*args, **kwargs)
            _set_grad_enabled(self.folds)
            try:
                return self.target(*args, **kwargs)
            finally:
                _set_grad_enabled(not self.folds)
        settings = under_settings(self.settings) if changed else contextlib.nullcontext()
        with torch.set_grad_enabled(self.folds), under_autocast(self._changed()), generators_at(self.states or {}):
            with settings:
                return self.target(*args, **kwargs)

    def _changed(self) -> list[tuple[str, bool, torch.dtype]]:
        """The autocast modes of the call that are not in force."""
        if not self.autocast and not _any_autocast():
            return []
        now = {device: (device, on, dtype) for device, on, dtype in _autocast_modes()}
        wanted = {row[0]: row for row in self.autocast}
        off = [(device, False, now[device][2]) for device in now.keys() - wanted.keys()]
        return [*off, *(row for device, row in wanted.items() if now.get(device) != row)]

    def _filled(self, template: Any, memory: torch.Tensor | None) -> Any:
        if type(template) is Argument:
            tensor = template.value(memory)
            return tensor.requires_grad_() if self.folds and template.trained and not template.own else tensor
        if type(template) is tuple or type(template) is list:
            return type(template)([self._filled(t, memory) for t in template])
        if type(template) is slice:
            return slice(*(self._filled(t, memory) for t in (template.start, template.stop, template.step)))
        return template


def _autocast_modes() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """The devices that compute in another type here and now."""
    return tuple((d, True, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


class _Holder:
    """Holds the arguments of one call."""

    __slots__ = ("at", "exported", "found", "given", "moves", "nested", "own")

    def __init__(
        self,
        at: Mapping[int, ReplayBuffer],
        own: ReplayBuffer | None,
        moves: bool,
        given: Callable[[], Collection[int]],
        exported: Collection[int],
    ) -> None:
        self.at, self.own, self.moves, self.given, self.exported = at, own, moves, given, exported
        self.found: list[Argument] = []
        self.nested = False

    def held(self, value: Any) -> Any:
        """A template of an argument."""
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            return self.tensor(value, kind is nn.Parameter)
        if kind in ATOMS:
            return value
        if kind is tuple or isinstance(value, list):  # a list that is tracked (Keras') becomes a plain one
            self.nested = True
            made = [self.held(v) for v in value]
            return tuple(made) if kind is tuple else made
        if kind is slice:
            self.nested = True
            return slice(*(self.held(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, np.generic):
            return value
        raise NotRepeatable(kind.__name__)

    def tensor(self, tensor: torch.Tensor, parameter: bool) -> Argument:
        """How a tensor argument is found again: by the buffer it lies in, or by itself; raises if it cannot be."""
        if tensor.layout is not torch.strided:
            raise NotRepeatable(str(tensor.layout))
        if is_lazy_view(tensor):
            raise NotRepeatable("a view that is conjugated or negated when it is read")
        address, geometry, own, held = tensor.untyped_storage().data_ptr(), None, False, None
        if self.exported and address in self.exported:
            raise NotRepeatable("memory that another library may write")
        trained = tensor.requires_grad
        if (cell := self.at.get(address)) is not None:
            geometry = _new(Geometry, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
            if own := cell is self.own:
                cell = None
        else:
            if not trained and not parameter and _may_be_state(tensor) and address not in self.given():
                tensor = over(raw(tensor).clone(), Geometry.of(tensor))
                address = tensor.untyped_storage().data_ptr()
            held = tensor if self.moves and parameter else tensor.detach()
        version = version_of(tensor)
        argument: Argument = _new(Argument, (address, cell, geometry, own, parameter, held, trained, version))
        self.found.append(argument)
        return argument


def _may_be_state(tensor: torch.Tensor) -> bool:
    small = 0 < tensor.untyped_storage().nbytes() <= _SMALL
    return small and not tensor.is_inference()


def _nothing() -> Collection[int]:
    return ()


def record(
    run: Callable[..., Any],
    name: str,
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    at: Mapping[int, ReplayBuffer],
    own: ReplayBuffer | None = None,
    moves: bool = False,
    given: Callable[[], Collection[int]] = _nothing,
    exported: Collection[int] = (),
) -> RecordedCall | None:
    """Hold a call before it happens, a layer with its attributes as they are now; none if it cannot be repeated.

    Args:
        run: the function that is called.
        name: what the table of operations calls it, or the class of the layer.
        module: the layer that is called, if it is one.
        args: of the call.
        kwargs: of the call.
        at: address of a storage -> the managed buffer in it.
        own: the buffer that the call is about to write into, if it is one.
        moves: whether parameters change their memory between calls.
        given: addresses of the storages that the model was called with.
        exported: addresses of storages that another library may write, as NumPy does through ``tensor.numpy()``.
    """
    kind = again(name)
    if kind is None or name in _FROM_HOST or (kwargs and ("out" in kwargs or kwargs.get("max_norm") is not None)):
        return None
    states = generator_states(args, kwargs) if kind == "random" else None
    folds = name in FOLDING
    holder = _Holder(at, own, moves, given, exported)
    if kind == "statistics" and module is None:
        if name not in _NORMS or run is not _NORMS[name][0]:
            return None
        run = _NORMS[name][1]
        args, kwargs = _with_own_statistics(args, kwargs)
    try:
        template = [a if type(a) in ATOMS else holder.held(a) for a in args]
        named = {k: holder.held(v) for k, v in kwargs.items()} if kwargs else kwargs
        known = function_of(module) if module is not None and len(args) == 1 and not kwargs else None
        if known is not None:
            run, parameters, constants = known
            template += [holder.held(p) for p in parameters]
            template += constants
        elif module is not None:
            if module.__dict__.get("max_norm") is not None:
                return None
            layer = _as_it_is(module, holder, statistics=kind == "statistics", folds=folds)
            run = NormAgain(layer) if kind == "statistics" else layer.forward
    except NotRepeatable:
        return None
    return RecordedCall(run, template, named, holder.found, folds, states, holder.nested)


def _with_own_statistics(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a functional norm with copies of its running statistics: torch writes these without counting it."""

    def own(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    named = {k: own(v) if k in ("running_mean", "running_var") else v for k, v in kwargs.items()}
    return (*args[:1], *(own(a) for a in args[1:3]), *args[3:]), named


def _as_it_is(module: nn.Module, holder: _Holder, *, statistics: bool, folds: bool) -> nn.Module:
    """A layer with the attributes, parameters and running statistics that a module has now."""
    layer: nn.Module = object.__new__(type(module))
    attributes = module.__dict__.copy()
    parameters = attributes["_parameters"]
    if parameters:
        attributes["_parameters"] = {n: _weight(p, holder, folds=folds) for n, p in parameters.items()}
    buffers = attributes["_buffers"]
    if buffers:
        copied = statistics and not module.training
        attributes["_buffers"] = {n: b.clone() if copied and b is not None else b for n, b in buffers.items()}
    object.__setattr__(layer, "__dict__", attributes)
    return layer


def _weight(parameter: torch.Tensor | None, holder: _Holder, *, folds: bool) -> torch.Tensor | None:
    """A parameter as a layer's copy has it, checked for writes before the layer runs again."""
    if parameter is None:
        return None
    argument = holder.tensor(parameter, isinstance(parameter, nn.Parameter))
    if argument.tensor is None or holder.moves:
        return parameter
    return argument.tensor.requires_grad_(parameter.requires_grad) if folds else argument.tensor


def cast_of(
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    at: Mapping[int, ReplayBuffer],
    *,
    moves: bool,
) -> RecordedCall | None:
    """Hold an argument of a call of which an operation has made a copy in another type; none if there is no such."""
    tensor = dict(leaves((args, kwargs), torch.Tensor)).get(path)
    if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    holder = _Holder(at, None, moves, _nothing, ())
    try:
        holder.tensor(tensor, type(tensor) is nn.Parameter)
    except NotRepeatable:
        return None
    return RecordedCall(torch.Tensor.to, (), {}, holder.found, False, None, False)
