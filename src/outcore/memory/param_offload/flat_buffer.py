"""Flat buffers: many small tensors that are copied as few dense ones.

A copy costs some microseconds before the first byte moves, so hundreds of small tensors (the scales and biases of a
network) must not be copied one by one. A *flat buffer* is a run of tensors that are used one after the other, laid out
in one piece of off-device storage. The tensors stay the objects they are. While offloaded, a tensor is a view of that
storage, which everybody may read and write: saving, loading, printing need to know nothing. While *resident*, it is a
view of its place in the *window* (`outcore.memory.param_offload.device_window`), device memory that flat buffers share.

    off device   | conv1 bn1 conv2 bn2 ...  |  fc1  |  fc2  |        pinned host memory, or a mapped file
    window               | fc1  | conv1 bn1 conv2 ... |              the device

Large flat buffers are copied in pieces, and a piece may be fetched as soon as whatever was in its place has been
written back, so that both directions of the link are busy at the same time. A copy into a place waits for the events of
what was there before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from outcore.errors import OutcoreError
from outcore.memory.offload.copy_streams import CopyEvent, CopyStreams, Ends
from outcore.memory.param_offload.device_window import DeviceWindow, Piece, WindowPlace
from outcore.memory.replay.replay_buffer import Geometry
from outcore.planner.memory.buckets import ALIGN, packed, rounded

_SMALL_BYTES = 64 * 2**20
_PIECE_BYTES = 12 * 2**20
"""A fetch into a place follows the write-back from it piece by piece; each piece takes the host some ten
microseconds."""
_LEAST_BYTES, _MOST_PIECES = 2 * 2**20, 16


@dataclass(frozen=True, slots=True)
class FlatBufferTensor:
    """One tensor of a flat buffer."""

    tensor: torch.Tensor
    offset: int
    """Bytes from the start of the flat buffer."""
    geometry: Geometry

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """A view of the tensor in memory that holds the flat buffer."""
        dtype, size, stride, _ = self.geometry
        start = int(memory.storage_offset()) + self.offset
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start // dtype.itemsize, size, stride)


class FlatBuffer:
    """Tensors that are copied together."""

    def __init__(
        self,
        name: str,
        members: Sequence[FlatBufferTensor],
        off_device: torch.Tensor,
        window: DeviceWindow,
        copy_streams: CopyStreams,
    ) -> None:
        self.name, self.members, self.off_device, self.window, self.copy_streams = (
            name,
            tuple(members),
            off_device,
            window,
            copy_streams,
        )
        self.bytes = off_device.numel()
        self.pieces = cut(0, self.bytes)
        self.small = self.bytes <= _SMALL_BYTES
        self.place: WindowPlace | None = None
        """Where it is in the window, or will be."""
        self.copies_in: list[CopyEvent] = []
        self.copies_out: list[CopyEvent] = []
        """Copies out, by piece, since it was last fetched."""
        self.resident = False
        """Whether its tensors are views of the window."""
        self.exposed = False
        """User code may have written to it since it was fetched."""
        self.versions: tuple[int, ...] = ()
        self.pending: set[int] = set()
        """Where parts begin that were updated and are not written back yet
        (`outcore.memory.param_offload.writeback`)."""
        self._tensors = tuple(m.tensor for m in self.members)
        self._off_device_views = [m.over(off_device) for m in self.members]
        self._views: list[torch.Tensor] = []
        self._lasting: list[torch.Tensor] = []
        self._at = _addresses(self._off_device_views)
        """The addresses of its tensors, unless somebody gave them other memory."""
        self._ends: list[Ends] = []

    # Fetch

    def prefetch(self) -> None:
        """Start to copy it to the device."""
        if self.place is None:
            self.place = self.window.take(self.pieces)
            self._copy_in(self.place.before)

    def mark_updated(self, starts: Iterable[int]) -> None:
        """Note that it was updated on the device; the parts that begin at `starts` are written back one by one."""
        self.rebind()
        self.pending, self.copies_out = set(starts), []
        self.exposed, self.versions = False, self._versions()

    def _copy_in(self, before: Sequence[Sequence[CopyEvent]]) -> None:
        copies_out = self.copies_out
        copies = [
            (on_device, off_device, (*before[i], *copies_out[i : i + 1]))
            for i, (on_device, off_device) in enumerate(self._ends_of_copies())
        ]
        self.copies_in = self.copy_streams.copy(copies, out=False, small=self.small)
        self.copies_out = []

    def make_resident(self) -> None:
        """Let the compute stream wait for its copies and point its tensors at the window; it must have been
        prefetched."""
        for event in self.copies_in:
            event.wait()
        self.copies_in = []
        if not self.resident:
            self._views = self._over_place()
            for member, view in zip(self.members, self._views, strict=True):
                member.tensor.data = view
            self.resident, self._at = True, _addresses(self._views)
            self.versions = self._versions()

    def _over_place(self) -> list[torch.Tensor]:
        """Views of its place, made once if it is always the same."""
        assert self.place is not None
        if self.place.lasting and self._lasting:
            return self._lasting
        found = [m.over(self.place.memory) for m in self.members]
        if self.place.lasting:
            self._lasting = found
        return found

    def _ends_of_copies(self) -> list[Ends]:
        """Every piece on the device and off it, made once if it is always in the same place."""
        assert self.place is not None
        if self.place.lasting and self._ends:
            return self._ends
        memory = self.place.memory
        found = [(memory[a:b], self.off_device[a:b]) for a, b in self.pieces]
        if self.place.lasting:
            self._ends = found
        return found

    def _versions(self) -> tuple[int, ...]:
        return tuple([tensor._version for tensor in self._tensors])

    # Write back and evict

    def write_back(self) -> None:
        """Start to copy it off the device; it stays resident."""
        assert self.place is not None
        self.make_resident()
        self.rebind()
        ready = self.copy_streams.now()
        copies = [(off_device, on_device, (ready,)) for on_device, off_device in self._ends_of_copies()]
        self.copies_out = self.copy_streams.copy(copies, out=True, small=self.small)
        self.versions, self.exposed, self.pending = self._versions(), False, set()

    def evict(self) -> None:
        """Give its place in the window back and point its tensors at off-device storage."""
        if self.place is None:
            return
        # What was prefetched in vain was read off the device after it had been written there.
        events = self.copies_out = self.copies_in or self.copies_out
        if self.resident and self.copies_in:  # parts of a round trip, not pieces: its place is free after all of them
            for event in self.copies_in:
                event.wait()
            events = []
        self.window.give(self.place, self.pieces, events)
        if self.resident:
            for member, off_device in zip(self.members, self._off_device_views, strict=True):
                member.tensor.data = off_device
            self._at = _addresses(self._off_device_views)
        self.place, self.copies_in, self._views, self.resident, self.exposed = None, [], [], False, False

    def synchronize(self) -> None:
        """Let the host wait until its write-back is complete."""
        for event in self.copies_out:
            event.finish()
        if self.place is None:
            self.copies_out = []

    @property
    def modified(self) -> bool:
        """Whether a tensor was written since it was fetched or written back, as far as torch counts writes."""
        return self.resident and (bool(self.pending) or self.versions != self._versions())

    def rebind(self) -> bool:
        """Copy tensors that somebody gave other memory (``p.data = ...``) back into the buffer; returns whether there
        were any."""
        if _addresses(self._tensors) == self._at:
            return False
        found = False
        views = self._views if self.resident else self._off_device_views
        for member, view in zip(self.members, views, strict=True):
            tensor = member.tensor
            if tensor.data_ptr() == view.data_ptr():
                continue
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise OutcoreError(
                    f"a parameter that outcore offloads became {list(tensor.shape)} {tensor.dtype}, but was "
                    f"{list(view.shape)} {view.dtype}; call outcore.release(model) before changing it"
                )
            self.synchronize()
            view.copy_(tensor.detach())
            tensor.data = view
            found = True
        return found


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def cut(start: int, end: int, piece_bytes: int = _PIECE_BYTES, most: int = _MOST_PIECES) -> list[Piece]:
    """Cut a range of bytes into equal pieces; what is not tiny gives at least two, because a fetch is one piece
    behind."""
    size = end - start
    count = max(1, min(2, size // _LEAST_BYTES), min(-(-size // piece_bytes), most))
    return list(itertools.pairwise([start + i * size // count // ALIGN * ALIGN for i in range(count)] + [end]))


def movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory that it fills and shares with no other."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if not tensor.numel() or (tensor.device.type == "cpu" and tensor.is_shared()):
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def lay_out(
    tensors: Sequence[torch.Tensor], most_bytes: int, first_bytes: int | None = None
) -> list[tuple[list[FlatBufferTensor], int]]:
    """Pack tensors, in this order, into flat buffers of about `most_bytes` each."""
    flat_buffers = []
    for positions in packed([t.numel() * t.element_size() for t in tensors], most_bytes, first_bytes):
        members, size = [], 0
        for tensor in (tensors[i] for i in positions):
            members.append(FlatBufferTensor(tensor, size, Geometry.of(tensor)))
            size += rounded(tensor.numel() * tensor.element_size())
        flat_buffers.append((members, size))
    return flat_buffers
