"""The memory of one running forward: which piece of it is whose, what leaves, and what comes back.

`outcore.memory.saved_tensors.live_forward` sees the calls of the user's code. What they do to memory is noted here: a
call that begins a buffer of the plan gives it a cell, what autograd saves becomes a handle to a cell, and a buffer
whose last use in forward is over leaves as its policy says. Memory is recognised by the address of its storage; an
address is forgotten when its buffer leaves, before it can be used again.

After forward only autograd holds the cells, by their handles; what they need of this (where copies are due, who brings
parameters) lives as long as one of them does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outcore.graph.structure import leaves
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.offload.backends import Backend
from outcore.memory.param_offload.buckets import BucketTensor
from outcore.memory.replay.replay_buffer import BackwardProgress, Geometry, SavedHandle, is_lazy_view, over
from outcore.memory.saved_tensors.policy_table import BufferPlan, CallPlan, PolicyTable
from outcore.memory.saved_tensors.recompute import RecordedCall, cast_of
from outcore.memory.saved_tensors.recompute_batch_norm import NORMS, RELUS, BatchNormCall
from outcore.memory.saved_tensors.saved_buffer import SavedBuffer
from outcore.ops.recompute_encode import need
from outcore.program.policies import KEEP, Recompute

if TYPE_CHECKING:
    from outcore.memory.param_offload.offloader import StateOffloader

ORDINARY = (torch.Tensor, nn.Parameter)
_new: Any = tuple.__new__
"""Makes a named tuple without calling Python."""
_FACTORIES = {"zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn"}


class SavedBuffers(BackwardProgress):
    """The buffers of one forward."""

    def __init__(self, table: PolicyTable, tier: Backend | None, keeper: StateOffloader | None) -> None:
        super().__init__(table.length, table.released_late, table.fetched)
        self.table, self.tier, self.keeper = table, tier, keeper
        self.at: dict[int, SavedBuffer] = {}
        """Address of a storage -> the cell of what is in it."""
        self.plan: CallPlan
        """Of the call that is running."""
        self.pending: list[SavedHandle] = []
        """What autograd has saved of it and is in no cell yet."""
        self._cells: dict[str, SavedBuffer] = {}
        self._readers: dict[int, list[weakref.ref[SavedBuffer]]] = {}
        """Address of a storage -> cells that are made again from what is in it."""
        self._copying: dict[int, SavedBuffer] = {}
        """Address of a storage -> the cell whose copy out may be under way."""
        self.exported: set[int] = set()
        """Addresses of storages that another library may write from now on."""
        self.rescuing: list[SavedBuffer] | None = None
        """While a cell is brought back before its time: what else came back for it."""

    # Forward

    def finish(self) -> None:
        """Forward is over: what the plan expected to leave at another call leaves now."""
        for cell in self._cells.values():
            if not cell.has_left:
                cell.leave(self.tier)
                cell.left()

    def forget(self) -> None:
        """Drop all references, so that from here on only autograd holds the cells."""
        for table in (self._cells, self.at, self._readers, self._copying):
            table.clear()
        self.exported.clear()
        self.pending.clear()

    def after(self, plan: CallPlan, result: Any) -> None:
        """A planned call is over: what was used for the last time leaves."""
        if plan.stops:
            self.stop_before(plan.position, (tensor for _, tensor in tensors_in(result)))
        for name in plan.counted:
            if (cell := self._cells.get(name)) is not None:
                cell.count()
        for name in plan.leaving:
            if (cell := self._cells.get(name)) is not None and not cell.has_left:
                self._leave(cell)
        for name in plan.released:
            if (cell := self._cells.get(name)) is not None:
                cell.left()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves a tensor."""
        kind = type(tensor)
        if kind not in ORDINARY or tensor.layout is not torch.strided or is_lazy_view(tensor):
            return tensor.detach()
        if self.keeper is not None:
            if (borrowed := self.keeper.claim(tensor)) is not None:
                self.pending.append(borrowed)  # it counts among what the call keeps
                return borrowed
        elif (plan := self.plan).direct:
            if kind is nn.Parameter:
                return SavedHandle(tensor)
            cell = self.at.get(tensor.untyped_storage().data_ptr())
            if cell is not None and cell.policy.codec != "sign":
                return SavedHandle.to(cell, tensor, plan.position)
        handle = SavedHandle(tensor)
        self.pending.append(handle)
        return handle

    def bear(self, plan: BufferPlan, path: str, tensor: torch.Tensor, name: str, call: RecordedCall | None) -> None:
        """New memory: its cell takes responsibility."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.at or tensor.is_inference():
            return
        policy = plan.policy
        again = type(policy) is Recompute
        if again and (call is None or storage.nbytes() != tensor.nbytes):
            policy, again = KEEP, False
        cell = self._cells[plan.name] = self.at[address] = SavedBuffer(plan.name, policy, self)
        cell.path, cell.memory = path, tensor.detach()
        cell.lay = _new(Geometry, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
        if again:
            assert call is not None
            if not call.arguments and name in _FACTORIES:
                call.kwargs = {**call.kwargs, "device": tensor.device, "dtype": tensor.dtype}
                call.nested = True
            cell.wrote(call)
            self.note_reader(cell, call)
            if name in NORMS:
                self._note_norm(cell, tensor, name, call)
        elif policy.offloads:
            self.waiting[plan.name] = weakref.ref(cell)

    def note_reader(self, cell: SavedBuffer, call: RecordedCall) -> None:
        reference = weakref.ref(cell)
        readers = self._readers
        for argument in call.arguments:
            if not argument.own:
                if (known := readers.get(argument.address)) is None:
                    readers[argument.address] = [reference]
                else:
                    known.append(reference)

    def _note_norm(self, cell: SavedBuffer, out: torch.Tensor, name: str, call: RecordedCall) -> None:
        """A batch norm has run that will be made again: keep its statistics, if they are enough."""
        layer: Any = call.target.module  # type: ignore[attr-defined]
        if not (layer.training or layer.running_mean is None) or layer.weight is None:
            return
        x = call.arguments[0].cell.memory if call.arguments[0].cell is not None else call.arguments[0].tensor
        if x is None or x.shape != out.shape:
            return
        key = f"{cell.name} {x.dtype} {x.stride()}"
        norm = BatchNormCall(key, "", "", layer, relu=False)
        saved = [h.tensor for h in self.pending if h.tensor is not None]
        found = self.table.renorm.statistics(norm, x, out, saved)
        if found is not None:
            cell.norm = norm, found

    def settle(
        self,
        plan: CallPlan,
        name: str,
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        window: PoolWindow | None,
    ) -> None:
        """Give the handles of a call to their cells."""
        if plan.direct and self.keeper is None:
            for handle in self.pending:
                assert handle.tensor is not None
                if (cell := self.at.get(handle.tensor.untyped_storage().data_ptr())) is not None:
                    if cell.policy.codec == "sign":
                        cell.policy = KEEP
                    handle.point_to(cell, plan.position)
            self.pending = []
            return
        shapes = plan.shape_only if plan.shape_only and _shape_is_enough(name, module, args, kwargs) else ()
        places: dict[int, int] = {}
        made: dict[int, SavedBuffer] = {}
        for handle in self.pending:
            tensor = handle.tensor
            if isinstance(handle, BucketTensor):
                places.setdefault(id(handle.member), len(places))
                continue
            assert tensor is not None
            address = tensor.untyped_storage().data_ptr()
            if (cell := self.at.get(address)) is not None:
                if cell.policy.codec == "sign" and not (plan.signs and name in RELUS):
                    cell.policy = KEEP
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
        self.pending = []
        for cell in made.values():
            cell.leave(self.tier)

    def _derived(
        self,
        plan: BufferPlan,
        tensor: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        window: PoolWindow | None,
    ) -> SavedBuffer | None:
        """A cell for what an operation derives for its backward, if that is what the plan means."""
        codec = plan.policy.codec
        if codec == "window" and (window is None or tensor.dtype is not torch.int64):
            return None
        if codec == "bits" and not (tensor.dtype is torch.bool or tensor.is_floating_point()):
            return None
        cell = SavedBuffer(plan.name, plan.policy, self, derived=True, window=window if codec == "window" else None)
        if isinstance(plan.policy, Recompute):
            call = cast_of(plan.copy_of, args, kwargs, self.at, moves=self.keeper is not None)
            if call is None or not self._is_cast(plan.name, call, tensor):
                return None
            cell.cast = tensor.dtype
            cell.wrote(call)
            self.note_reader(cell, call)
        cell.born(tensor)
        self._cells[plan.name] = cell
        if plan.policy.offloads:
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

    def _leave(self, cell: SavedBuffer) -> None:
        """The last use of a buffer in forward is over."""
        address = 0
        if cell.memory is not None:
            address = cell.memory.untyped_storage().data_ptr()
            if self.at.get(address) is cell:
                del self.at[address]
        cell.leave(self.tier)
        if cell.offloaded is not None and cell.memory is not None:
            self._copying[address] = cell

    def about_to_write(self, tensor: Any, by: SavedBuffer | None = None) -> None:
        """A tensor is about to be written in place; `by` is the cell that has recorded the call which does it."""
        if type(tensor) is list or type(tensor) is tuple:  # functions on lists of tensors
            for each in tensor:
                self.about_to_write(each)
            return
        if type(tensor) not in ORDINARY or tensor.layout is not torch.strided:
            return
        address = tensor.untyped_storage().data_ptr()
        cell = self.at.get(address)
        if cell is not None and cell is not by and isinstance(cell.policy, Recompute):
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

    def about_to_export(self, tensor: Any) -> None:
        """Another library (NumPy) gets the memory of a tensor, and may write it whenever it likes: nothing that is in
        it, and nothing made from that, is made again from here on."""
        if type(tensor) in ORDINARY and tensor.layout is torch.strided:
            self.about_to_write(tensor)
            self.exported.add(tensor.untyped_storage().data_ptr())


def unpack(packed: Any) -> torch.Tensor:
    """The saved tensor that autograd holds something for."""
    if type(packed) is SavedHandle and (cell := packed.cell) is not None:
        if cell.owner.waiting:
            cell.owner.reached(packed.position)
        return cell.view(packed.geometry, packed.version)  # type: ignore[arg-type]
    return packed.unpack() if isinstance(packed, SavedHandle) else packed


def tensors_in(result: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors in what a call returns."""
    return (("", result),) if isinstance(result, torch.Tensor) else leaves(result, torch.Tensor)


def _shape_is_enough(name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's backward needs no more than the shape of its input, as things are now."""
    if module is not None:
        trained = any(p is not None and p.requires_grad for p in module._parameters.values())
    else:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        trained = isinstance(weight, torch.Tensor) and weight.requires_grad
    return need(name, "input", weights_trained=trained) == "shape"
