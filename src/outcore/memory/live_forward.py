"""One forward under policies: the user's own code runs, and is aligned with the plan as it goes.

Module calls and functions on tensors are seen in order (`outcore.memory.module_calls`, a `TorchFunctionMode`) and
looked up in the plan by where they happen (`outcore.memory.policy_table`). What the plan knows gets its policy:

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
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from outcore.graph.intercept import opened
from outcore.graph.keys import hooks_of
from outcore.graph.naming import function_name
from outcore.graph.structure import leaves
from outcore.memory.bit_relu import rectified_by_bits
from outcore.memory.byte_pool import pooled_by_bytes
from outcore.memory.cell import Geometry, Handle, over
from outcore.memory.live_cell import LiveCell
from outcore.memory.lots import Borrowed
from outcore.memory.module_calls import call_module, current_watcher, unwatched, watched
from outcore.memory.policy_table import BufferPlan, CallPlan, PolicyTable
from outcore.memory.recompute import RecordedCall, cast_of, generators_of, record_function, record_module
from outcore.memory.renorm import NORMS, RELUS, Norm
from outcore.memory.tiers import Tier
from outcore.memory.windows import Window, window_of_call
from outcore.ops.again import again, need
from outcore.ops.encoding import codec_of, moves

if TYPE_CHECKING:
    from outcore.memory.state import StateKeeper

__all__ = ["LiveForward"]

_ORDINARY = (torch.Tensor, nn.Parameter)
_COMPOSITES = {F.multi_head_attention_forward}
_SHORT_CUTS = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
"""Layers that compute in another way where nothing is to be differentiated, unless somebody looks at functions."""
_FACTORIES = {"zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn"}
_HARMLESS = {"requires_grad_", "retain_grad"}
_autograd: Any = torch._C._autograd
_torch_c: Any = torch._C
_stack_depth, _pop_mode, _push_mode = (
    _torch_c._len_torch_function_stack,
    _torch_c._pop_torch_function_stack,
    _torch_c._push_on_torch_function_stack,
)


class _Function:
    """What is known of a function in one module's forward."""

    __slots__ = ("busy", "composite", "name", "plans", "writes")

    def __init__(self, func: Callable[..., Any], name: str, plans: Mapping[int, CallPlan]) -> None:
        self.name, self.plans, self.composite = name, plans, func in _COMPOSITES
        self.writes = (name.endswith("_") and name not in _HARMLESS) or name == "setitem"
        self.busy = bool(plans) or self.writes or self.composite


class LiveForward(TorchFunctionMode):
    """One forward of the user's model; what backward needs to know of it lives as long as a cell does."""

    def __init__(self, table: PolicyTable, tier: Tier | None, keeper: StateKeeper | None = None) -> None:
        super().__init__()
        self.table, self.tier, self.keeper = table, tier, keeper
        self.position = table.length
        """How far backward has come."""
        self.waiting: dict[str, weakref.ref[LiveCell]] = {}
        """Buffers that were offloaded."""
        self.met = 0
        """Planned calls that came."""
        self._node = table.root
        self._counts: dict[object, int] = {}
        self._cells: dict[str, LiveCell] = {}
        self._at: dict[int, LiveCell] = {}
        """Address of a storage -> the cell of what is in it."""
        self._readers: dict[int, list[weakref.ref[LiveCell]]] = {}
        """Address of a storage -> cells that are made again from what is in it."""
        self._copying: dict[int, LiveCell] = {}
        """Address of a storage -> the cell whose copy out may be under way."""
        self._pending: list[Handle] = []
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
            for cell in self._cells.values():
                if not cell.has_left:  # the plan expected another call
                    cell.leave(self.tier)
                    cell.left()
            return result
        finally:
            if isinstance(outer, LiveForward):
                outer._quiet -= 1
            self._forget()

    def _forget(self) -> None:
        """From here on only autograd holds the cells."""
        for table in (self._cells, self._at, self._readers, self._copying, self._counts):
            table.clear()
        self._pending.clear()
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
        node = self.table.nodes.get(id(module))
        if self._quiet or node is None or node.module() is not module:
            return call_module(module, *args, **kwargs)
        if node.kind == "container":
            if isinstance(module, _SHORT_CUTS) and _takes_short_cut(module, args, kwargs):
                return self._aside(call_module, (module, *args), kwargs)
            before, self._node = (self._node, self._sharded), node
            self._sharded |= node.type is not type(module)
            try:
                return call_module(module, *args, **kwargs)
            finally:
                self._node, self._sharded = before
        if node.kind == "opaque":
            return self._aside(call_module, (module, *args), kwargs, compiled=True)
        plan = None
        if node.calls:
            count = self._counts.get(node, 0)
            self._counts[node] = count + 1
            plan = node.calls.get(count) if node.type is type(module) else None
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or "forward" in own:
            if "forward" in own or hooks_of(module):
                return self._beside(plan, call_module, (module, *args), kwargs)
        if plan is not None:
            return self._aside(self._managed, (plan, plan.type, call_module, module, args, kwargs), {})
        if own.get("inplace") and args:
            self._about_to_write(args[0])
        if _stack_depth() != self._depth:  # somebody else's mode is on top
            return self._aside(call_module, (module, *args), kwargs)
        _pop_mode()
        try:
            return call_module(module, *args, **kwargs)
        finally:
            _push_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function on tensors is called."""
        known: _Function | None = self._node.seen.get(func)
        if known is None:
            known = self._look_up(func)
        if not known.busy and not kwargs:
            return func(*args)
        return self._on_function(func, known, args, kwargs or {})

    def _on_function(
        self, func: Callable[..., Any], known: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function that may be planned, or write in place."""
        if self._quiet == 0:
            if known.composite:
                with self, opened():
                    return func(*args, **kwargs)
            if known.plans:
                count = self._counts.get(known, 0)
                self._counts[known] = count + 1
                if (plan := known.plans.get(count)) is not None:
                    return self._managed(plan, known.name, func, None, args, kwargs)
        if known.writes and args:
            self._about_to_write(args[0])
        elif kwargs:
            if args and kwargs.get("inplace"):
                self._about_to_write(args[0])
            if "out" in kwargs:
                for tensor in _written(kwargs["out"]):
                    self._about_to_write(tensor)
        return func(*args, **kwargs)

    def _look_up(self, func: Callable[..., Any]) -> _Function:
        """What is known of a function here; all functions of one name are counted together."""
        node = self._node
        name = function_name(func)
        key = name, func in _COMPOSITES
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
            self._after(plan, result)
        return result

    # A planned call

    def _managed(
        self,
        plan: CallPlan,
        name: str,
        run: Callable[..., Any],
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call that the plan has something to say about."""
        called = args if module is None else (module, *args)
        written = self._written_by(name, module, args, kwargs)
        if "out" in kwargs:
            for tensor in _written(kwargs["out"]):
                self._about_to_write(tensor)
        if not torch.is_grad_enabled() or _top_hooks() != self._hooks or _torch_c._are_functorch_transforms_active():
            if written is not None:
                self._about_to_write(written)
            return self._beside(plan, run, called, kwargs)
        self.met += 1
        own = self._at.get(written.untyped_storage().data_ptr()) if written is not None else None
        call: RecordedCall | None = None
        if plan.records:
            how: dict[str, Any] = {"own": own, "moves": self.keeper is not None, "given": self._given}
            how["states"] = generators_of(args, kwargs) if again(name) == "random" else None
            if module is None:
                call = record_function(run, name, args, kwargs, self._at, **how)
            else:
                call = record_module(module, args, kwargs, self._at, **how)
            if call is not None and self._sharded and any(a.parameter for a in call.arguments):
                call = None
        if written is not None:
            self._about_to_write(written, by=own if call is not None else None)
        window = window_of_call(name, module, args, kwargs) if plan.windows else None
        pools = window is not None and not _wants_indices(module, args, kwargs)
        if plan.signs and name in RELUS:
            run = rectified_by_bits(run, inplace=written is not None, of_module=module is not None)
        elif pools and window is not None:
            run = pooled_by_bytes(run, window, of_module=module is not None)
        if not plan.hooked:
            result = run(*called, **kwargs)
        else:
            self._pending = []
            _autograd._push_saved_tensors_default_hooks(self._pack, _unpack)
            try:
                result = run(*called, **kwargs)
            finally:
                _autograd._pop_saved_tensors_default_hooks()
        if own is not None and written is not None:
            own.wrote(call)
            own.rectified = name in RELUS and len(own.writers) == 2
            if call is not None:
                self._note_reader(own, call)
        if plan.born:
            for path, tensor in _tensors(result):
                if (buffer := plan.born.get(path)) is not None:
                    self._bear(buffer, path, tensor, name, call)
        if self._pending:
            self._settle(plan, name, module, args, kwargs, window)
        self._after(plan, result)
        return result

    def _after(self, plan: CallPlan, result: Any) -> None:
        """A planned call is over: what was used for the last time leaves."""
        if plan.stops:
            self._stop(plan.position, result)
        for name in plan.counted:
            if (cell := self._cells.get(name)) is not None:
                cell.count()
        for name in plan.leaving:
            if (cell := self._cells.get(name)) is not None and not cell.has_left:
                self._leave(cell)
        for name in plan.released:
            if (cell := self._cells.get(name)) is not None:
                cell.left()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided or tensor.is_conj():
            return tensor.detach()
        if self.keeper is not None and (borrowed := self.keeper.claim(tensor)) is not None:
            self._pending.append(borrowed)  # it counts among what the call keeps
            return borrowed
        handle = Handle(tensor)
        self._pending.append(handle)
        return handle

    def _bear(self, plan: BufferPlan, path: str, tensor: torch.Tensor, name: str, call: RecordedCall | None) -> None:
        """New memory: its cell takes responsibility."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._at or tensor.is_inference():
            return
        policy = plan.policy
        if policy == "recompute" and (call is None or storage.nbytes() != tensor.numel() * tensor.element_size()):
            policy = "keep"
        cell = self._cells[plan.name] = LiveCell(plan.name, policy, self)
        cell.path, cell.lay = path, Geometry.of(tensor)
        cell.born(tensor)
        self._at[address] = cell
        if policy == "recompute":
            assert call is not None
            if not call.arguments and name in _FACTORIES:
                call.kwargs = {**call.kwargs, "device": tensor.device, "dtype": tensor.dtype}
            cell.wrote(call)
            self._note_reader(cell, call)
            if name in NORMS:
                self._note_norm(cell, tensor, name, call)
        elif moves(policy):
            self.waiting[plan.name] = weakref.ref(cell)

    def _note_reader(self, cell: LiveCell, call: RecordedCall) -> None:
        reference = weakref.ref(cell)
        for argument in call.arguments:
            if not argument.own:
                self._readers.setdefault(argument.address, []).append(reference)

    def _note_norm(self, cell: LiveCell, out: torch.Tensor, name: str, call: RecordedCall) -> None:
        """A batch norm has run that will be made again: keep its statistics, if they are enough."""
        layer: Any = call.target.module  # type: ignore[attr-defined]
        if not (layer.training or layer.running_mean is None) or layer.weight is None:
            return
        x = call.arguments[0].cell.memory if call.arguments[0].cell is not None else call.arguments[0].tensor
        if x is None or x.shape != out.shape:
            return
        key = f"{cell.name} {x.dtype} {x.stride()}"
        norm = Norm(key, "", "", layer, relu=False)
        saved = [h.tensor for h in self._pending if h.tensor is not None]
        found = self.table.renorm.statistics(norm, x, out, saved)
        if found is not None:
            cell.norm = norm, found

    def _settle(
        self,
        plan: CallPlan,
        name: str,
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        window: Window | None,
    ) -> None:
        """Give the handles of a call to their cells."""
        shapes = plan.shape_only if plan.shape_only and _shape_is_enough(name, module, args, kwargs) else ()
        places: dict[int, int] = {}
        made: dict[int, LiveCell] = {}
        for handle in self._pending:
            tensor = handle.tensor
            if isinstance(handle, Borrowed):
                places.setdefault(id(handle.member), len(places))
                continue
            assert tensor is not None
            address = tensor.untyped_storage().data_ptr()
            if (cell := self._at.get(address)) is not None:
                if cell.policy == "encode:sign" and not (plan.signs and name in RELUS):
                    cell.policy = "keep"
                if cell.name in shapes:
                    handle.keep_shape(cell)
                else:
                    handle.point_to(cell, plan.position)
            if not plan.derived:
                continue
            place = places.setdefault(address, len(places))
            wanted = plan.derived.get(place)
            if cell is None and wanted is not None:
                if address not in made:
                    derived = self._derived(wanted, tensor, args, kwargs, window)
                    if derived is None:
                        continue
                    made[address] = derived
                    derived.version = handle.version
                # Parts of one piece may count their versions each for itself (cuDNN's weights do).
                version = made[address].version
                handle.point_to(made[address], plan.position)
                made[address].version = version
        self._pending = []
        for cell in made.values():
            cell.leave(self.tier)

    def _derived(
        self,
        plan: BufferPlan,
        tensor: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        window: Window | None,
    ) -> LiveCell | None:
        """A cell for what an operation derives for its backward, if that is what the plan means."""
        codec = codec_of(plan.policy)
        if codec == "window" and (window is None or tensor.dtype is not torch.int64):
            return None
        if codec == "bits" and not (tensor.dtype is torch.bool or tensor.is_floating_point()):
            return None
        cell = LiveCell(plan.name, plan.policy, self, derived=True, window=window if codec == "window" else None)
        if plan.policy == "recompute":
            call = cast_of(plan.copy_of, args, kwargs, self._at, moves=self.keeper is not None)
            if call is None or not self._is_cast(plan.name, call, tensor):
                return None
            cell.cast = tensor.dtype
            cell.wrote(call)
            self._note_reader(cell, call)
        cell.born(tensor)
        self._cells[plan.name] = cell
        if moves(plan.policy):
            self.waiting[plan.name] = weakref.ref(cell)
        return cell

    def _is_cast(self, name: str, call: RecordedCall, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor is the copy of an argument in another type: seen once for each layout."""
        (source,) = call.arguments
        whole = source.tensor
        if whole is None:
            assert source.cell is not None and source.cell.memory is not None and source.geometry is not None
            whole = over(source.cell.memory, source.geometry)
        key = f"{name} {whole.dtype} {tuple(whole.shape)} {whole.stride()} {tensor.dtype} {tensor.stride()}"
        known = self.table.verified
        if key not in known:
            cast = whole.detach().to(tensor.dtype)
            same_memory = cast.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
            flat = cast.is_contiguous() and tensor.is_contiguous() and cast.numel() == tensor.numel()
            alike = tensor.shape == cast.shape and tensor.stride() == cast.stride()
            fits = same_memory and tensor.storage_offset() == 0 and (alike or flat)
            known[key] = fits and bool(torch.equal(cast.reshape(-1), tensor.reshape(-1)))
        return known[key]

    def _leave(self, cell: LiveCell) -> None:
        """The last use of a buffer in forward is over."""
        address = 0
        if cell.memory is not None:
            address = cell.memory.untyped_storage().data_ptr()
            if self._at.get(address) is cell:
                del self._at[address]
        cell.leave(self.tier)
        if cell.trip is not None and cell.memory is not None:
            self._copying[address] = cell

    def _stop(self, position: int, result: Any) -> None:
        """Backward is to stop before a call, whether or not that asks for something it saved."""
        reference = weakref.ref(self)

        def reached(_: Any) -> None:
            if (live := reference()) is not None:  # else nothing of it is waiting any more
                live.reached(position)

        for _, tensor in _tensors(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)

    # Writes in place

    @staticmethod
    def _written_by(
        name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """The tensor that a call is about to write into."""
        if module is not None:
            written = bool(module.__dict__.get("inplace"))
        else:
            written = (name.endswith("_") and name not in _HARMLESS) or name == "setitem" or bool(kwargs.get("inplace"))
        first = args[0] if args else next(iter(kwargs.values()), None)
        return first if written and isinstance(first, torch.Tensor) else None

    def _about_to_write(self, tensor: Any, by: LiveCell | None = None) -> None:
        """A tensor is about to be written in place; `by` is the cell that has recorded the call which does it."""
        if type(tensor) is list or type(tensor) is tuple:  # functions on lists of tensors
            for each in tensor:
                self._about_to_write(each)
            return
        if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided:
            return
        address = tensor.untyped_storage().data_ptr()
        cell = self._at.get(address)
        if cell is not None and cell is not by and cell.policy == "recompute":
            cell.keep()
        if (readers := self._readers.pop(address, None)) is not None:
            for reader in filter(None, (reference() for reference in readers)):
                if reader is not by and reader.reads(address):
                    if reader.has_left:
                        reader.rescue()
                    else:
                        reader.keep()
        if (copied := self._copying.pop(address, None)) is not None:
            copied.left()

    # Backward

    def reached(self, position: int) -> None:
        """Backward has come to a call: release and fetch what is due."""
        if position >= self.position or not self.waiting:
            return
        table = self.table
        for place in range(self.position, position - 1, -1):
            for name in table.released_late.get(place, ()):
                if (cell := self._cell(name)) is not None:
                    cell.left()
            for name in table.fetched.get(place, ()):
                if (cell := self._cell(name)) is not None:
                    cell.left()
                    cell.fetch()
        self.position = position

    def _cell(self, name: str) -> LiveCell | None:
        reference = self.waiting.get(name)
        return reference() if reference is not None else None


def _unpack(packed: Any) -> torch.Tensor:
    return packed.unpack() if isinstance(packed, Handle) else packed


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


def _tensors(result: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors in what a call returns."""
    return (("", result),) if isinstance(result, torch.Tensor) else leaves(result, torch.Tensor)


def _written(out: Any) -> Iterable[Any]:
    """The tensors that ``out=`` names."""
    if out is None:
        return ()
    return out if isinstance(out, (tuple, list)) else (out,)


def _shape_is_enough(name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's backward needs no more than the shape of its input, as things are now."""
    if module is not None:
        trained = any(p is not None and p.requires_grad for p in module._parameters.values())
    else:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        trained = isinstance(weight, torch.Tensor) and weight.requires_grad
    return need(name, "input", weights_trained=trained) == "shape"


def _wants_indices(module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a pool returns its indices too."""
    if module is not None:
        return bool(getattr(module, "return_indices", False))
    return bool(kwargs.get("return_indices", args[6] if len(args) > 6 else False))


def _hide_from_compiler() -> None:
    """A function that is compiled inside forward runs as it is written, not traced through what stands here."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _hidden:
        for name in ("live_forward", "live_cell", "cell", "recompute", "module_calls"):
            rules.add(f"outcore.memory.{name}")
        _hidden.append(True)


_hidden: list[bool] = []
