"""One forward under policies: the user's own code runs, and is aligned with the plan as it goes.

Module calls and functions on tensors are seen in order (`outcore.graph.record.intercept`, a
`TorchFunctionMode`) and looked up in the plan by where they happen (`outcore.memory.saved_tensors.policy_table`). What
the plan knows gets its policy:

    before the call    note what it takes to run it again, if its output is to be made again
    during the call    hooks on what autograd saves collect handles
    after the call     new memory gets its cell; handles point to cells; what was used for the last time leaves

Everything else just runs. Nothing here changes what the user's code computes or in which order: what is not in the plan
is kept by autograd as ever, a call with hooks of the user's, under hooks of somebody else's on saved tensors
(checkpointing), without gradients or inside a ``torch.func`` transform is left alone. So a run that differs from the
plan costs memory or time, never a number.

Memory that something is made from may be written in place. Where that is seen coming, whatever is made from it is
brought back first and kept. Where it is not, versions tell, and backward refuses.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from outcore.graph.naming import function_name
from outcore.graph.record.intercept import call_module, current_watcher, is_recording, opened, unwatched, watched
from outcore.graph.record.keys import hooks_of
from outcore.graph.structure import leaves
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.chunked_loss.lazy_rows import lazily
from outcore.memory.encode.bitmask_relu import rectified_by_bits
from outcore.memory.encode.byte_index_pool import pooled_by_bytes
from outcore.memory.encode.pool_positions import window_of_call
from outcore.memory.offload.backends import Backend
from outcore.memory.param_offload.residency import DEVICE_QUERIES
from outcore.memory.saved_tensors.policy_table import CallPlan, ModulePlans, PolicyTable
from outcore.memory.saved_tensors.recompute import record
from outcore.memory.saved_tensors.recompute_batch_norm import RELUS
from outcore.memory.saved_tensors.saved_buffers import SavedBuffers, tensors_in, unpack

if TYPE_CHECKING:
    from outcore.memory.param_offload.offloader import StateOffloader

_COMPOSITES = {F.multi_head_attention_forward}
_SHORT_CUTS = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
"""Layers that compute in another way where nothing is to be differentiated, unless somebody looks at functions."""
_HARMLESS = {"requires_grad_", "retain_grad"}
_EXPORTS = {"numpy", "array", "dlpack"}
"""Methods that give the memory of a tensor to another library."""
_modules: Any = nn.modules.module
_autograd: Any = torch._C._autograd
_push_hooks, _pop_hooks = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks
_torch_c: Any = torch._C
_stack_depth, _pop_mode, _push_mode = (
    _torch_c._len_torch_function_stack,
    _torch_c._pop_torch_function_stack,
    _torch_c._push_on_torch_function_stack,
)


class _Function:
    """What is known of a function in one module's forward."""

    __slots__ = ("asks_device", "busy", "composite", "exports", "name", "plans", "writes")

    def __init__(self, func: Callable[..., Any], name: str, plans: Mapping[int, CallPlan]) -> None:
        self.name, self.plans, self.composite = name, plans, func in _COMPOSITES
        self.writes = (name.endswith("_") and name not in _HARMLESS) or name == "setitem"
        self.asks_device = func in DEVICE_QUERIES
        self.exports = name in _EXPORTS
        self.busy = bool(plans) or self.writes or self.composite or self.asks_device or self.exports


class LiveForward(TorchFunctionMode):
    """One forward of the user's model."""

    def __init__(self, table: PolicyTable, tier: Backend | None, keeper: StateOffloader | None = None) -> None:
        super().__init__()
        self.table, self.tier, self.keeper = table, tier, keeper
        self.buffers = SavedBuffers(table, tier, keeper)
        self.met = 0
        """Planned calls that came."""
        self._node, self._nodes = table.root, table.nodes
        self._counts: dict[object, int] = {}
        self._quiet = 0
        """Inside a call that is one step of the plan."""
        self._sharded = False
        """Inside a module that was sharded since it was planned: its parameters are gone when its forward is over."""
        self._depth = 0
        """Of the stack of modes, with this one on top."""
        self._called: Any = ()
        """What the model was called with."""
        self._addresses: frozenset[int] | None = None

    @property
    def diverged(self) -> bool:
        """Whether planned calls did not come."""
        return self.met < len(self.table.calls)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward; returns what it returns."""
        _hide_from_compiler()
        outer = current_watcher()
        self._called = args, kwargs
        if isinstance(outer, LiveForward):
            outer._quiet += 1
        try:
            with self.keeper.hooked() if self.keeper is not None else contextlib.nullcontext():
                self._hooks = _top_hooks()
                with watched(self), self:
                    self._depth = _stack_depth()
                    result = forward(*args, **kwargs)
            self.buffers.finish()
            return result
        finally:
            if isinstance(outer, LiveForward):
                outer._quiet -= 1
            self.buffers.forget()
            self._counts.clear()
            self._called = ()

    def _given(self) -> frozenset[int]:
        """Addresses of the storages that the model was called with."""
        if self._addresses is None:
            tensors = [t for _, t in leaves(self._called, torch.Tensor) if t.layout is torch.strided]
            self._addresses = frozenset(t.untyped_storage().data_ptr() for t in tensors)
        return self._addresses

    # What the user's code does

    def on_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called."""
        if self._quiet or (node := self._nodes.get(id(module))) is None or node.module() is not module:
            return call_module(module, *args, **kwargs)
        if node.kind != "module":
            return self._on_container(node, module, args, kwargs)
        plan = None
        if node.calls:
            count = self._counts.get(node, 0)
            self._counts[node] = count + 1
            plan = node.calls.get(count) if node.type is type(module) else None
        own = module.__dict__
        direct = not (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or "_compiled_call_impl" in own
            or _modules._global_forward_hooks
            or _modules._global_forward_pre_hooks
            or _modules._global_backward_hooks
            or _modules._global_backward_pre_hooks
        )
        if not direct and ("forward" in own or hooks_of(module)):
            return self._beside(plan, call_module, (module, *args), kwargs)
        writes = "inplace" in own and bool(own["inplace"])
        mine = _stack_depth() == self._depth  # nobody else's mode is on top
        if mine:
            _pop_mode()
        self._quiet += 1
        try:
            if plan is not None:
                return self._managed(plan, plan.type, None if direct else call_module, module, args, kwargs, writes)
            if writes and args:
                self.buffers.about_to_write(args[0])
            return module.forward(*args, **kwargs) if direct else call_module(module, *args, **kwargs)
        finally:
            self._quiet -= 1
            if mine:
                _push_mode(self)

    def _on_container(self, node: ModulePlans, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module that is more than one call, or of which only the outside is known."""
        if node.kind == "opaque":
            return self._aside(call_module, (module, *args), kwargs, compiled=True)
        if isinstance(module, _SHORT_CUTS) and _takes_short_cut(module, args, kwargs):
            return self._aside(call_module, (module, *args), kwargs)
        before, self._node = (self._node, self._sharded), node
        self._sharded |= node.type is not type(module)
        try:
            return call_module(module, *args, **kwargs)
        finally:
            self._node, self._sharded = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function on tensors is called."""
        known: _Function | None = self._node.seen.get(func)
        if known is None:
            known = self._look_up(func)
        if not known.busy:
            if not kwargs:
                return func(*args)
            if "out" not in kwargs and "inplace" not in kwargs:
                return func(*args, **kwargs)
        return self._on_function(func, known, args, kwargs or {})

    def _on_function(
        self, func: Callable[..., Any], known: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function that may be planned, write in place, or ask where a parameter is."""
        if known.asks_device and self.keeper is not None:
            args = self.keeper.asked_where(args)
        if self._quiet == 0:
            if known.composite:
                with self, opened():
                    return func(*args, **kwargs)
            if known.plans:
                count = self._counts.get(known, 0)
                self._counts[known] = count + 1
                if (plan := known.plans.get(count)) is not None:
                    writes = known.writes or (bool(kwargs) and bool(kwargs.get("inplace")))
                    return self._managed(plan, known.name, func, None, args, kwargs, writes)
        if known.exports and args:
            self.buffers.about_to_export(args[0])
        elif known.writes and args:
            self.buffers.about_to_write(args[0])
        elif kwargs:
            if args and kwargs.get("inplace"):
                self.buffers.about_to_write(args[0])
            if "out" in kwargs:
                for tensor in _written(kwargs["out"]):
                    self.buffers.about_to_write(tensor)
        return func(*args, **kwargs)

    def _look_up(self, func: Callable[..., Any]) -> _Function:
        """What is known of a function here; all functions of one name are counted together."""
        node = self._node
        name = function_name(func)
        key = name, func in _COMPOSITES, func in DEVICE_QUERIES
        if key not in node.seen:
            node.seen[key] = _Function(func, name, node.functions.get(name, {}))
        known: _Function = node.seen[key]
        node.seen[func] = known
        return known

    def _aside(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool = False
    ) -> Any:
        """Run something whose inside is not looked at."""
        mine = _stack_depth() == self._depth
        if mine:
            _pop_mode()
        self._quiet += 1
        try:
            if not compiled:
                return run(*args, **kwargs)
            with unwatched():
                return run(*args, **kwargs)
        finally:
            self._quiet -= 1
            if mine:
                _push_mode(self)

    def _beside(
        self, plan: CallPlan | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that is left alone; what was to leave after it leaves."""
        self._quiet += 1
        try:
            result = run(*args, **kwargs)
        finally:
            self._quiet -= 1
        if plan is not None:
            self.buffers.after(plan, result)
        return result

    # A planned call

    def _managed(
        self,
        plan: CallPlan,
        name: str,
        run: Callable[..., Any] | None,
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        writes: bool,
    ) -> Any:
        """Run a call that the plan has something to say about: a function, or a module (by its forward alone, if `run`
        is none); `writes` if it writes into its first argument."""
        buffers, written, own, called = self.buffers, None, None, args
        if run is None:
            assert module is not None
            run = module.forward
        elif module is not None:
            called = (module, *args)
        if writes:
            first = args[0] if args else next(iter(kwargs.values()), None)
            written = first if isinstance(first, torch.Tensor) else None
        if kwargs and "out" in kwargs:
            for tensor in _written(kwargs["out"]):
                buffers.about_to_write(tensor)
        if not torch.is_grad_enabled() or _top_hooks() != self._hooks or _torch_c._are_functorch_transforms_active():
            if written is not None:
                buffers.about_to_write(written)
            return self._beside(plan, run, called, kwargs)
        self.met += 1
        if plan.rows_per_chunk and not self._sharded and self.keeper is None:
            lazy = lazily(plan.rows_per_chunk, name, module, args, kwargs)
            if lazy is not None:
                buffers.after(plan, lazy)
                return lazy
        if written is not None and (own := buffers.at.get(written.untyped_storage().data_ptr())) is not None:
            own.keep_if_written_unseen()
        call = None
        if plan.records:
            call = record(
                run, name, module, args, kwargs, buffers.at, own, self.keeper is not None, self._given, buffers.exported
            )
            if call is not None and self._sharded and any(a.parameter for a in call.arguments):
                call = None
        if written is not None:
            buffers.about_to_write(written, by=own if call is not None else None)
        window = None
        if plan.special:
            run, called, window = self._by_signs_or_positions(plan, name, run, module, args, kwargs, writes=writes)
        if not plan.hooked:
            result = run(*called, **kwargs)
        else:
            buffers.plan, buffers.pending = plan, []
            _push_hooks(buffers.pack, unpack)
            try:
                result = run(*called, **kwargs)
            finally:
                _pop_hooks()
        if own is not None:
            own.wrote(call)
            own.rectified = name in RELUS and len(own.writers) == 2
            if call is not None:
                buffers.note_reader(own, call)
        if plan.born:
            if type(result) is torch.Tensor:
                if (buffer := plan.born.get("")) is not None:
                    buffers.bear(buffer, "", result, name, call)
            else:
                for path, tensor in tensors_in(result):
                    if (buffer := plan.born.get(path)) is not None:
                        buffers.bear(buffer, path, tensor, name, call)
        if buffers.pending:
            buffers.settle(plan, name, module, args, kwargs, window)
        if plan.ends:
            buffers.after(plan, result)
        return result

    @staticmethod
    def _by_signs_or_positions(
        plan: CallPlan,
        name: str,
        run: Callable[..., Any],
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        writes: bool,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], PoolWindow | None]:
        """A ReLU that keeps signs alone, or a pool that keeps positions alone: what to run, and with what."""
        called = args
        if module is not None:
            run, called = call_module, (module, *args)
        window = window_of_call(name, module, args, kwargs) if plan.windows else None
        if plan.signs and name in RELUS:
            return rectified_by_bits(run, inplace=writes, of_module=module is not None), called, window
        if window is not None and not _wants_indices(module, args, kwargs):
            return pooled_by_bytes(run, window, of_module=module is not None), called, window
        return run, called, window


def _top_hooks() -> Any:
    """The hooks on saved tensors that are in force."""
    return _autograd._top_saved_tensors_default_hooks(True)


def _takes_short_cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing of a layer that does not train is differentiated."""
    if module.training:
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (t for _, t in leaves((args, kwargs), torch.Tensor))
    return not any(t.requires_grad for t in (*module.parameters(), *tensors))


def is_looked_at() -> bool:
    """Whether the model is recorded, traced, exported or transformed, and not trained: then it runs as it is."""
    return (
        is_recording()
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or forward_ad._current_level >= 0
    )


def _written(out: Any) -> Iterable[Any]:
    """The tensors that ``out=`` names."""
    if out is None:
        return ()
    return out if isinstance(out, (tuple, list)) else (out,)


def _wants_indices(module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a pool returns its indices too."""
    if module is not None:
        return bool(getattr(module, "return_indices", False))
    return bool(kwargs.get("return_indices", args[6] if len(args) > 6 else False))


def _hide_from_compiler() -> None:
    """A function that is compiled inside forward runs as it is written, not traced through what stands here."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _hidden:
        for name in ("live_forward", "saved_buffers", "saved_buffer", "recompute"):
            rules.add(f"outcore.memory.saved_tensors.{name}")
        rules.add("outcore.memory.replay.replay_buffer")
        _hidden.append(True)


_hidden: list[bool] = []
