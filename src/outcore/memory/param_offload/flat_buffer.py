"""Flat buffers: many small tensors that travel as few dense ones.

A copy costs some microseconds before the first byte moves, so hundreds of small tensors (the scales and biases of a
network) must not travel one by one. A *flat buffer* is a run of tensors that are used one after the other, laid out in
one piece of memory below the device: their *home*. The tensors stay the objects they are. At home a tensor is a view of
its home, which everybody may read and write: saving, loading, printing need to know nothing. When the flat buffer is
*here*, the tensor is a view of its place on the *stage* (`outcore.memory.param_offload.device_window`), device memory
that flat buffers share.

    home      | conv1 bn1 conv2 bn2 ...  |  fc1  |  fc2  |        pinned host memory, or a mapped file
    stage             | fc1  | conv1 bn1 conv2 ... |              the device

Large flat buffers are copied in pieces, and a piece may come in as soon as whatever was in its place has left, so that
the two directions of the link work at the same time. Who comes next into a place waits for the marks of who was there.
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

__all__ = ["FlatBuffer", "FlatBufferTensor", "cut", "lay_out", "movable"]

_EXPRESS_BYTES = 64 * 2**20
_PIECE_BYTES = 12 * 2**20
"""What comes into a place follows what leaves it piece by piece; and each takes the host some ten microseconds."""
_LEAST_BYTES, _MOST_PIECES = 2 * 2**20, 16


@dataclass(frozen=True, slots=True)
class FlatBufferTensor:
    """One tensor of a flat buffer."""

    tensor: torch.Tensor
    offset: int
    """Bytes from the start of the flat buffer."""
    geometry: Geometry

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Its view of a piece of memory that holds the flat buffer."""
        dtype, size, stride, _ = self.geometry
        start = int(memory.storage_offset()) + self.offset
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start // dtype.itemsize, size, stride)


class FlatBuffer:
    """Tensors that travel together."""

    def __init__(
        self,
        name: str,
        members: Sequence[FlatBufferTensor],
        home: torch.Tensor,
        stage: DeviceWindow,
        copy_streams: CopyStreams,
    ) -> None:
        self.name, self.members, self.home, self.stage, self.copy_streams = (
            name,
            tuple(members),
            home,
            stage,
            copy_streams,
        )
        self.bytes = home.numel()
        self.pieces = cut(0, self.bytes)
        self.express = self.bytes <= _EXPRESS_BYTES
        self.place: WindowPlace | None = None
        """Where it is on the stage, or will be."""
        self.arriving: list[CopyEvent] = []
        self.leaving: list[CopyEvent] = []
        """Copies out, by piece, since it was last brought here."""
        self.here = False
        """Its tensors are views of the stage."""
        self.exposed = False
        """User code may have written to it since it came."""
        self.versions: tuple[int, ...] = ()
        self.owed: set[int] = set()
        """Where parts begin that were updated here and have not left yet (`outcore.memory.param_offload.writeback`)."""
        self._tensors = tuple(m.tensor for m in self.members)
        self._homes = [m.over(home) for m in self.members]
        self._views: list[torch.Tensor] = []
        self._lasting: list[torch.Tensor] = []
        self._at = _addresses(self._homes)
        """Where its tensors are, unless somebody gave them other memory."""
        self._ends: list[Ends] = []

    # Coming

    def book(self) -> None:
        """Start to bring it here."""
        if self.place is None:
            self.place = self.stage.take(self.pieces)
            self._copy_in(self.place.before)

    def owe(self, starts: Iterable[int]) -> None:
        """It was updated where it is; the parts that begin there leave one by one."""
        self.adopt()
        self.owed, self.leaving = set(starts), []
        self.exposed, self.versions = False, self._versions()

    def _copy_in(self, before: Sequence[Sequence[CopyEvent]]) -> None:
        leaving = self.leaving
        copies = [
            (here, home, (*before[i], *leaving[i : i + 1])) for i, (here, home) in enumerate(self._ends_of_copies())
        ]
        self.arriving = self.copy_streams.copy(copies, out=False, express=self.express)
        self.leaving = []

    def arrive(self) -> None:
        """What is computed from here on finds it on the stage; it must have been booked."""
        for mark in self.arriving:
            mark.wait()
        self.arriving = []
        if not self.here:
            self._views = self._over_place()
            for member, view in zip(self.members, self._views, strict=True):
                member.tensor.data = view
            self.here, self._at = True, _addresses(self._views)
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
        """Every piece here and at home, made once if it is always in the same place."""
        assert self.place is not None
        if self.place.lasting and self._ends:
            return self._ends
        memory = self.place.memory
        found = [(memory[a:b], self.home[a:b]) for a, b in self.pieces]
        if self.place.lasting:
            self._ends = found
        return found

    def _versions(self) -> tuple[int, ...]:
        return tuple([tensor._version for tensor in self._tensors])

    # Leaving

    def send(self) -> None:
        """Start to copy it home; it stays here."""
        assert self.place is not None
        self.arrive()
        self.adopt()
        ready = self.copy_streams.now()
        copies = [(home, here, (ready,)) for here, home in self._ends_of_copies()]
        self.leaving = self.copy_streams.copy(copies, out=True, express=self.express)
        self.versions, self.exposed, self.owed = self._versions(), False, set()

    def depart(self) -> None:
        """Give its place on the stage back; its tensors are at home from now on."""
        if self.place is None:
            return
        # What was brought here for nothing was read from home after it had left for there.
        marks = self.leaving = self.arriving or self.leaving
        if self.here and self.arriving:  # parts that come back, not pieces: its place is free after all of them
            for mark in self.arriving:
                mark.wait()
            marks = []
        self.stage.give(self.place, self.pieces, marks)
        if self.here:
            for member, home in zip(self.members, self._homes, strict=True):
                member.tensor.data = home
            self._at = _addresses(self._homes)
        self.place, self.arriving, self._views, self.here, self.exposed = None, [], [], False, False

    def settle(self) -> None:
        """The host waits until its home holds what was sent."""
        for mark in self.leaving:
            mark.finish()
        if self.place is None:
            self.leaving = []

    @property
    def touched(self) -> bool:
        """Whether something is not at home: a tensor was written, as far as torch counts, since it came or was sent."""
        return self.here and (bool(self.owed) or self.versions != self._versions())

    def adopt(self) -> bool:
        """Take over tensors that somebody gave other memory (``p.data = ...``); returns whether there were any."""
        if _addresses(self._tensors) == self._at:
            return False
        found = False
        views = self._views if self.here else self._homes
        for member, view in zip(self.members, views, strict=True):
            tensor = member.tensor
            if tensor.data_ptr() == view.data_ptr():
                continue
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise OutcoreError(
                    f"a parameter that outcore offloads became {list(tensor.shape)} {tensor.dtype}, but was "
                    f"{list(view.shape)} {view.dtype}; call outcore.release(model) before changing it"
                )
            self.settle()
            view.copy_(tensor.detach())
            tensor.data = view
            found = True
        return found


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def cut(start: int, end: int, piece_bytes: int = _PIECE_BYTES, most: int = _MOST_PIECES) -> list[Piece]:
    """Equal pieces, since the way back is behind by the largest; what is not tiny is at least two."""
    size = end - start
    count = max(1, min(2, size // _LEAST_BYTES), min(-(-size // piece_bytes), most))
    return list(itertools.pairwise([start + i * size // count // ALIGN * ALIGN for i in range(count)] + [end]))


def movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory that it fills and shares with nobody."""
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
