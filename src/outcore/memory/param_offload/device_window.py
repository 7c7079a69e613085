"""The window: device memory that flat buffers share while they are resident.

A flat buffer takes a place when it is prefetched and gives it back when it is evicted, piece by piece: a piece of a
place may be written again as soon as what was copied from there is over. If there is room for all, every flat buffer
has its own place for good (`FixedWindow`) and waits for nothing but itself. If not, places come from the allocator
(`AllocatorWindow`): what a running operation or autograd still holds is then never overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from outcore.memory.offload.copy_streams import CopyEvent, CopyStreams

Piece = tuple[int, int]
"""Bytes from and to, within a flat buffer."""


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """Where a flat buffer is on the device."""

    memory: torch.Tensor
    before: Sequence[Sequence[CopyEvent]]
    """By piece, the events after which it may be written."""
    lasting: bool = False
    """Whether the flat buffer is always put there."""


class DeviceWindow(Protocol):
    """Device memory that flat buffers share."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """A place for a flat buffer that is cut into these pieces."""

    def give(self, place: WindowPlace, pieces: Sequence[Piece], events: Sequence[CopyEvent]) -> None:
        """Give a place back. Its pieces may be written again after one event each, or all after a single event; without
        events, after what was computed so far."""


class FixedWindow:
    """One piece of memory with room for all: a fetch waits only for what was in its own place."""

    def __init__(self, device: torch.device, size: int, copy_streams: CopyStreams) -> None:
        self.device, self.size, self.copy_streams = device, size, copy_streams

    @cached_property
    def memory(self) -> torch.Tensor:
        """Allocated when the first flat buffer is fetched, and kept."""
        found = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":  # other streams will write to what this one may still be using
            torch.cuda.current_stream(self.device).synchronize()
        return found

    def part(self, offset: int) -> FixedPlace:
        """The place of the flat buffer that begins at an offset."""
        return FixedPlace(self, offset)


class FixedPlace:
    """The place of one flat buffer in a fixed window."""

    def __init__(self, window: FixedWindow, offset: int) -> None:
        self.window, self.offset = window, offset
        self.before: Sequence[CopyEvent] = ()
        """By piece, when what was here may be overwritten."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """The buffer's fixed place in the window, with the events to wait for before each piece is written."""
        before = [[event] for event in self.before] or [[] for _ in pieces]
        return WindowPlace(self.window.memory[self.offset : self.offset + pieces[-1][1]], before, lasting=True)

    def give(self, place: WindowPlace, pieces: Sequence[Piece], events: Sequence[CopyEvent]) -> None:
        """Remember the events after which each piece may be written again."""
        several = len(events) == len(pieces)
        self.before = (
            list(events) if several else [events[-1] if events else self.window.copy_streams.now()] * len(pieces)
        )


class AllocatorWindow:
    """Memory from the allocator: a place lives as long as anybody holds a view of it, autograd for instance.

    At most one evicted place at a time is held until its copy is over, so that the memory in use is known beforehand.
    """

    def __init__(self, device: torch.device, copy_streams: CopyStreams) -> None:
        self.device, self.copy_streams = device, copy_streams
        self.copying_out: tuple[torch.Tensor, Sequence[CopyEvent]] | None = None
        """Memory that is still being copied from."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """A place in newly allocated memory; writing waits for what the compute stream has queued."""
        self.tidy()
        memory = torch.empty(pieces[-1][1], dtype=torch.uint8, device=self.device)
        return WindowPlace(memory, [[self.copy_streams.now()]] * len(pieces))

    def give(self, place: WindowPlace, pieces: Sequence[Piece], events: Sequence[CopyEvent]) -> None:
        """Drop the memory when its copies are over; the compute stream waits for the copies of the place given
        before."""
        if events:
            for event in self.copying_out[1] if self.copying_out is not None else ():
                event.wait()
            self.copying_out = place.memory, events
        self.tidy()

    def tidy(self) -> None:
        """Drop memory whose copies are over."""
        if self.copying_out is not None and all(event.done() for event in self.copying_out[1]):
            self.copying_out = None
