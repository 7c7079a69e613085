"""Parcels: many small tensors that travel as few dense ones.

A copy costs some microseconds before the first byte moves, so hundreds of small tensors (the scales and biases of a
network) must not travel one by one. A *parcel* is a run of tensors that are used one after the other, laid out in one
piece of memory below the device: their *home*. The tensors stay the objects they are. At home a tensor is a view of
its home, which everybody may read and write: saving, loading, printing need to know nothing. When the parcel is *here*,
the tensor is a view of a slot of the *stage*, a piece of device memory of a fixed size that all parcels share.

    home      | conv1 bn1 conv2 bn2 ...  |  fc1  |  fc2  |        pinned host memory, or a mapped file
    stage             | fc1  | conv1 bn1 conv2 ... |              the device

Large parcels are copied in pieces, and a piece may come in as soon as whatever was in its place has left, so that the
two directions of the link work at the same time. Who comes next into a place waits for the marks of who was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from outcore.errors import OutcoreError
from outcore.memory.arena import Arena, Slot
from outcore.memory.cell import Geometry
from outcore.memory.lanes import Lanes, Mark

__all__ = ["Member", "Parcel", "Stage", "lay_out", "movable"]

_ALIGN = 512
"""As allocators align: kernels choose by alignment, and must choose what they choose in plain training."""
_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a parcel."""

    tensor: torch.Tensor
    offset: int
    """Bytes from the start of the parcel."""
    geometry: Geometry

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Its view of a piece of memory that holds the parcel."""
        dtype, size, stride, _ = self.geometry
        start = int(memory.storage_offset()) + self.offset
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start // dtype.itemsize, size, stride)


class Stage:
    """Device memory that parcels share."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.arena = device, Arena(size)

    @cached_property
    def memory(self) -> torch.Tensor:
        """Taken when the first parcel comes, and kept."""
        found = torch.empty(self.arena.size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":  # other streams will write to what this one may still be using
            torch.cuda.current_stream(self.device).synchronize()
        return found


class Parcel:
    """Tensors that travel together."""

    def __init__(self, name: str, members: Sequence[Member], home: torch.Tensor, stage: Stage, lanes: Lanes) -> None:
        self.name, self.members, self.home, self.stage, self.lanes = name, tuple(members), home, stage, lanes
        self.bytes = home.numel()
        self.pieces = [(i, min(i + _PIECE_BYTES, self.bytes)) for i in range(0, self.bytes, _PIECE_BYTES)]
        self.express = len(self.pieces) == 1
        self.slot: Slot | None = None
        self.memory: torch.Tensor | None = None
        """Its place on the stage."""
        self.arriving: list[Mark] = []
        self.leaving: list[Mark] = []
        """Copies out, by piece, since it was last brought here."""
        self.here = False
        """Its tensors are views of the stage."""
        self.exposed = False
        """User code may have written to it since it came."""
        self.versions: tuple[int, ...] = ()
        self._homes = [m.over(home) for m in self.members]
        self._places: dict[int, list[torch.Tensor]] = {}

    # Coming

    def book(self) -> bool:
        """Start to bring it here; false if there is no room on the stage."""
        if self.memory is not None:
            return True
        self.slot = self.stage.arena.take(self.bytes)
        if self.slot is None:
            return False
        offset = self.slot.offset
        self.memory = self.stage.memory[offset : offset + self.bytes]
        for i, (start, end) in enumerate(self.pieces):
            before = self.stage.arena.marks(Slot(offset + start, -(-(end - start) // _ALIGN) * _ALIGN))
            before += self.leaving[i : i + 1]
            self.arriving.append(
                self.lanes.copy(self.memory[start:end], self.home[start:end], before, out=False, express=self.express)
            )
        self.leaving = []
        return True

    def arrive(self) -> None:
        """What is computed from here on finds it on the stage; it must have been booked."""
        assert self.slot is not None and self.memory is not None
        for mark in self.arriving:
            mark.wait()
        self.arriving = []
        if not self.here:
            for member, place in zip(self.members, self.places, strict=True):
                member.tensor.data = place
            self.here = True
            self.versions = tuple(m.tensor._version for m in self.members)

    @property
    def places(self) -> list[torch.Tensor]:
        """Views of the stage, made once for every place it is ever in."""
        assert self.slot is not None and self.memory is not None
        found = self._places.get(self.slot.offset)
        if found is None:
            found = self._places[self.slot.offset] = [m.over(self.memory) for m in self.members]
        return found

    # Leaving

    def send(self) -> None:
        """Start to copy it home; it stays here."""
        assert self.memory is not None
        self.adopt()
        ready = self.lanes.now()
        self.leaving = [
            self.lanes.copy(self.home[a:b], self.memory[a:b], (ready,), out=True, express=self.express)
            for a, b in self.pieces
        ]
        self.versions, self.exposed = tuple(m.tensor._version for m in self.members), False

    def depart(self) -> None:
        """Give its place on the stage back; its tensors are at home from now on."""
        if self.slot is None:
            return
        # What was brought here for nothing was read from home after it had left for there.
        marks = self.arriving or self.leaving or [self.lanes.now()] * len(self.pieces)
        for (start, end), mark in zip(self.pieces, marks, strict=True):
            size = -(-(end - start) // _ALIGN) * _ALIGN
            self.stage.arena.give(Slot(self.slot.offset + start, size), mark)
        if self.here:
            for member, home in zip(self.members, self._homes, strict=True):
                member.tensor.data = home
        self.leaving = self.arriving or self.leaving
        self.slot, self.memory, self.arriving, self.here, self.exposed = None, None, [], False, False

    def settle(self) -> None:
        """The host waits until its home holds what was sent."""
        for mark in self.leaving:
            mark.finish()
        if self.slot is None:
            self.leaving = []

    @property
    def touched(self) -> bool:
        """Whether a tensor was written, as far as torch counts, since it came or was sent."""
        return self.here and self.versions != tuple(m.tensor._version for m in self.members)

    def adopt(self) -> bool:
        """Take over tensors that somebody gave other memory (``p.data = ...``); returns whether there were any."""
        found = False
        views = self.places if self.here else self._homes
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


def movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory that it fills and shares with nobody."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if not tensor.numel() or (tensor.device.type == "cpu" and tensor.is_shared()):
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def lay_out(tensors: Iterable[torch.Tensor], most_bytes: int) -> list[tuple[list[Member], int]]:
    """Pack tensors, in this order, into parcels of at most so many bytes (a larger tensor is one by itself)."""
    parcels: list[tuple[list[Member], int]] = []
    members: list[Member] = []
    size = 0
    for tensor in tensors:
        needed = -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        if members and size + needed > most_bytes:
            parcels.append((members, size))
            members, size = [], 0
        members.append(Member(tensor, size, Geometry.of(tensor)))
        size += needed
    if members:
        parcels.append((members, size))
    return parcels
