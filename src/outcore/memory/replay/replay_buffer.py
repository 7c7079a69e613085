"""A saved tensor is a handle to a buffer; the buffer's policy says how it is restored.

Autograd holds `SavedHandle`s instead of tensors. A handle of a buffer that is kept holds the tensor. Any other points
to the buffer's `ReplayBuffer` (its cell), of which there is one per forward pass, and remembers which view of the
memory was saved. When backward unpacks a handle, the cell restores the memory (fetches it, decodes it, or recomputes it
from other cells), shares it with all handles, and releases it after the expected number of uses.

No references are counted to find out when a pass is over: autograd drops its handles, they their cells, and these the
cells they are recomputed from. A graph that is never differentiated takes its memory with it; one that is kept
(`retain_graph`) restores everything a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from outcore.graph.strides import has_known_format, same_layout
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.codecs import Encoded, EncodedBuffer, encode
from outcore.memory.encode.sparse_quantize import NonZeros
from outcore.memory.offload.backends import Backend, OffloadedBuffer
from outcore.memory.replay.replay_recompute import BufferRecompute
from outcore.program.policies import Keep, Offload, Policy, Recompute

if TYPE_CHECKING:
    from outcore.memory.replay.replay_forward import ReplayPass


class Geometry(NamedTuple):
    """The layout of a tensor in its memory."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The layout of a tensor."""
        found: Geometry = _tuple_new(cls, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
        return found


_tuple_new: Any = tuple.__new__


def over(memory: torch.Tensor, geometry: Geometry, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor with a layout, in the memory of another."""
    dtype_, size, stride, offset = geometry
    if (dtype is None or dtype == dtype_) and memory.dtype is dtype_ and memory.shape == size:
        if memory.stride() == stride and memory.storage_offset() == offset:
            return memory.detach()
    empty = torch.empty(0, dtype=dtype or geometry.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), geometry.offset, geometry.size, geometry.stride)


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are not those in its memory: a conjugate or negative that torch has not computed."""
    return tensor.is_conj() or tensor.is_neg()


def as_it_lay(made: torch.Tensor, lay: Geometry | None) -> torch.Tensor:
    """A recomputed tensor in the layout of before: without autograd, torch may lay it out otherwise (pools)."""
    if lay is None:
        return made
    if made.storage_offset() == lay.offset:
        if made.stride() == lay.stride or same_layout(lay.size, made.stride(), lay.stride):
            return made
    reach = lay.offset + 1 + sum((size - 1) * stride for size, stride in zip(lay.size, lay.stride, strict=True))
    memory = over(torch.empty(reach, dtype=lay.dtype, device=made.device), lay)
    return memory.copy_(made)


def raw(tensor: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """All of a tensor's memory as flat elements."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def _like(memory: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """A tensor in the layout of another."""
    return over(memory, Geometry.of(shape))


class BackwardProgress:
    """How far backward has come in one pass, and the offloaded buffers that are released and fetched on its way."""

    def __init__(
        self, calls: int, released_late: Mapping[int, tuple[str, ...]], fetched: Mapping[int, tuple[str, ...]]
    ) -> None:
        self.position = calls
        """The call that backward has come to; at first the one after the last."""
        self.waiting: dict[str, weakref.ref[ReplayBuffer]] = {}
        """Buffers that were offloaded."""
        self._released_late, self._fetched = released_late, fetched

    def reached(self, position: int) -> None:
        """Release and fetch what is due when backward has come to a call."""
        if position >= self.position or not self.waiting:
            return
        for place in range(self.position, position - 1, -1):
            for name in self._released_late.get(place, ()):
                if (cell := self._cell(name)) is not None:
                    cell.left()
            for name in self._fetched.get(place, ()):
                if (cell := self._cell(name)) is not None:
                    cell.left()
                    cell.fetch()
        self.position = position

    def stop_before(self, position: int, results: Iterable[torch.Tensor]) -> None:
        """Make backward stop before a call, whether or not that asks for something it saved."""
        reference = weakref.ref(self)

        def reached(_: Any) -> None:
            if (progress := reference()) is not None:  # else nothing of it is waiting any more
                progress.reached(position)

        for tensor in results:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)

    def _cell(self, name: str) -> ReplayBuffer | None:
        reference = self.waiting.get(name)
        return reference() if reference is not None else None


class SavedHandle:
    """What autograd holds instead of a tensor."""

    __slots__ = ("cell", "device", "geometry", "like", "position", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = 0 if tensor.is_inference() else tensor._version
        self.cell: ReplayBuffer | None = None
        self.geometry: Geometry | None = None
        self.device: torch.device | None = None
        self.like: weakref.ref[ReplayBuffer] | None = None
        self.position = 0

    @classmethod
    def to(cls, cell: ReplayBuffer, tensor: torch.Tensor, position: int) -> SavedHandle:
        """A handle of a tensor in the memory of a cell, which restores it."""
        handle = cls.__new__(cls)
        handle.tensor = handle.device = handle.like = None
        handle.cell, handle.position = cell, position
        handle.geometry = _tuple_new(Geometry, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
        handle.version = cell.version = tensor._version
        cell.saved = True
        cell.uses += 1
        return handle

    def point_to(self, cell: ReplayBuffer, position: int) -> None:
        """Drop the tensor; the cell restores its memory from now on."""
        assert self.tensor is not None
        self.cell, self.geometry, self.position = cell, Geometry.of(self.tensor), position
        cell.version = self.version
        cell.saved = True
        cell.uses += 1
        self.tensor = None

    def keep_shape(self, cell: ReplayBuffer) -> None:
        """Hold no more than the layout: backward reads the shape only, so any memory will do where its own is not
        there."""
        assert self.tensor is not None
        self.geometry, self.device, self.tensor = Geometry.of(self.tensor), self.tensor.device, None
        self.like = weakref.ref(cell)

    def unpack(self) -> torch.Tensor:
        """The saved tensor."""
        if self.device is not None:
            assert self.geometry is not None and self.like is not None
            if (cell := self.like()) is not None and cell.memory is not None and cell.dtype is None:
                return over(cell.memory, self.geometry)
            return torch.empty_strided(
                self.geometry.size, self.geometry.stride, dtype=self.geometry.dtype, device=self.device
            )
        if self.cell is not None:
            assert self.geometry is not None
            self.cell.owner.reached(self.position)
            return self.cell.view(self.geometry, self.version)
        assert self.tensor is not None
        if not self.tensor.is_inference() and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(self.tensor.shape)} is at version {self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


def unpack(packed: Any) -> torch.Tensor:
    """The tensor that autograd saved, from what was packed in its place."""
    return packed.unpack() if isinstance(packed, SavedHandle) else packed


class ReplayBuffer:
    """One buffer of one forward pass."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        owner: ReplayPass,
        *,
        dependents: int = 0,
        rerun: BufferRecompute | None = None,
        window: PoolWindow | None = None,
    ) -> None:
        self.name, self.policy, self.owner, self.rerun, self.window = name, policy, owner, rerun, window
        self.uses = dependents
        """How often backward will ask for it."""

    # Most cells never change these, and there is one cell per buffer and step.
    sources: Mapping[str, ReplayBuffer] = MappingProxyType({})
    """Value -> cell of the memory it lies in, for what the recomputation reads."""
    asked = 0
    memory: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    """The dtype of the restored elements, where it is another."""
    version = 0
    saved = False
    """Whether autograd has a handle of it."""
    coded: Encoded | None = None
    survey: tuple[NonZeros, int] | None = None
    """The count of nonzeros that was started before it is encoded, and the version it is of."""
    offloaded: OffloadedBuffer | None = None
    away = False
    """The memory was released; what is there now was restored and is temporary."""
    spoiled = False
    """It was overwritten after autograd had saved it."""

    # Forward

    def born(self, tensor: torch.Tensor) -> None:
        """Note the memory of the buffer, which was just made."""
        self.memory = tensor.detach()

    def count(self) -> None:
        """Start to count its nonzeros after its last write, on a GPU, beside its uses."""
        if self.memory is not None and self.memory.is_cuda:
            self.survey = NonZeros.of(raw(self.memory, self.memory.dtype)), self.memory._version

    def leave(self, tier: Backend | None) -> None:
        """Offload, encode or drop it after its last use in forward."""
        memory = self.memory
        if memory is not None and not self.saved:
            self.version = memory._version
        if memory is None or isinstance(self.policy, Keep) or not self.uses:
            self.memory = memory if self.uses else None
            return
        if memory._version != self.version and not isinstance(self.policy, Recompute):
            self.spoiled = True
            return
        if self.window is not None and not _fills(memory):
            return
        if isinstance(self.policy, Offload):
            if tier is None or not memory.untyped_storage().nbytes():
                return  # nothing was planned to leave, or there is nothing to take away
            if memory.device.type != tier.device.type:
                return  # below the device already: attention keeps the seed of its dropout on the host
        self.away = True
        if isinstance(self.policy, Offload):
            assert tier is not None
            self.offloaded = tier.evict(raw(memory))
            return  # the memory is held until the copy is over
        if codec := self.policy.codec:
            survey = self.survey[0] if self.survey is not None and self.survey[1] == memory._version else None
            self.coded = encode(codec, raw(memory, memory.dtype), indices=memory, window=self.window, survey=survey)
            self.survey = None
            self.dtype = torch.int8 if codec == "sign" else None
        if self.coded is not None and self.policy.offloads and tier is not None:
            self.offloaded = EncodedBuffer(self.coded, tier, raw, _like)
            self.coded = None
        self.memory = None

    def left(self) -> None:
        """The copy out is over, for whatever comes next."""
        if self.offloaded is not None and (self.memory is not None or self.policy.codec):
            self.offloaded.wait_out()
            self.memory = None

    # Backward

    def fetch(self) -> None:
        """Start to fetch it."""
        if self.memory is None and self.offloaded is not None:
            self.offloaded.fetch()

    def view(self, geometry: Geometry, version: int | None = None) -> torch.Tensor:
        """A tensor in its memory, which is restored if it must be; `version` is that of the memory when it was
        saved."""
        if self.spoiled or (self.memory is not None and not self.away and self.memory._version != self.version):
            self._refuse()
        memory = self.memory if self.memory is not None else self.bring_back()
        tensor = over(memory, geometry, self.dtype)
        self.asked += 1
        if self.asked >= self.uses:
            self.asked = 0
            if self.away:
                self.memory = None
        return tensor

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name}, which is needed for gradient computation, has been modified by an inplace operation"
        )

    def bring_back(self) -> torch.Tensor:
        """Restore the memory and keep it for later uses."""
        if self.offloaded is not None:
            self.memory = self.offloaded.bytes_back()
            if not graph_is_kept():
                self.offloaded = None
        elif self.coded is not None:
            self.memory = self.coded.decoded()
            if not graph_is_kept():
                self.coded = None
        else:
            self.recompute_chain()
        assert self.memory is not None
        return self.memory

    def recompute_chain(self) -> None:
        """Recompute it, after all that it is recomputed from (chains may be longer than Python's stack)."""
        if all(s.memory is not None or s.offloaded is not None or s.coded is not None for s in self.made_from()):
            self.recompute()
            return
        waiting = [self]
        while waiting:
            cell = waiting[-1]
            missing = [s for s in cell.made_from() if s.memory is None and s.offloaded is None and s.coded is None]
            if missing and cell.memory is None:
                waiting.extend(missing)
                continue
            waiting.pop()
            if cell.memory is None:
                cell.recompute()

    def made_from(self) -> Iterable[ReplayBuffer]:
        """The cells that its recomputation reads."""
        return self.sources.values()

    def recompute(self) -> None:
        """Recompute it from its sources."""
        assert self.rerun is not None
        values = {name: cell.view(self.owner.geometry[name]) for name, cell in self.sources.items()}
        values |= self.owner.given()
        if self.owner.keeper is not None:
            self.owner.keeper.fetch_for_recompute(self.rerun.steps)
        self.memory = self.owner.recompute_norm(self.rerun.norm, values)
        if self.memory is None:
            made = self.rerun.run(self.owner.model, self.owner.constants, values, self.owner.states)
            self.memory = as_it_lay(made, self.owner.geometry.get(self.name))
        if not graph_is_kept():
            self.sources = {}

    def __repr__(self) -> str:
        return f"Cell({self.name}, {self.policy}, {'there' if self.memory is not None else 'away'})"


def _fills(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory in an order that the codecs of indices know."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and has_known_format(tensor)


def graph_is_kept() -> bool:
    """Whether the running backward keeps the graph (`retain_graph`)."""
    return _task_id() == -1 or _keeps_graph()


_torch_c: Any = torch._C
_task_id: Callable[[], int] = _torch_c._current_graph_task_id
_keeps_graph: Callable[[], bool] = _torch_c._autograd._get_current_graph_task_keep_graph
