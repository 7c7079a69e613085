"""The stage: device memory that flat buffers share while they are here.

A flat buffer takes a place when it starts to come and gives it back when it leaves, piece by piece: a piece of a place
may be written again as soon as what was copied from there is over. If there is room for all, every flat buffer has its
own place for good (`FixedWindow`), and waits for nothing but itself. If not, places come from the allocator
(`AllocatorWindow`): what a running operation or autograd still holds is then never overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from outcore.memory.offload.copy_streams import CopyEvent, CopyStreams

__all__ = ["AllocatorWindow", "DeviceWindow", "FixedPlace", "FixedWindow", "Piece", "WindowPlace"]

Piece = tuple[int, int]
"""Bytes from and to, within a flat buffer."""


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """Where a flat buffer is on the device."""

    memory: torch.Tensor
    before: Sequence[Sequence[CopyEvent]]
    """By piece, what must be over before it may be written."""
    lasting: bool = False
    """Whether the flat buffer is always put there."""


class DeviceWindow(Protocol):
    """Device memory that flat buffers share."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """A place."""

    def give(self, place: WindowPlace, pieces: Sequence[Piece], marks: Sequence[CopyEvent]) -> None:
        """Give a place back, whose pieces may be written again after these marks, or all of them after one; without
        marks, after what was computed so far."""


class FixedWindow:
    """One piece of memory with room for all: what comes waits for nothing but what was in its place."""

    def __init__(self, device: torch.device, size: int, copy_streams: CopyStreams) -> None:
        self.device, self.size, self.copy_streams = device, size, copy_streams

    @cached_property
    def memory(self) -> torch.Tensor:
        """Taken when the first flat buffer comes, and kept."""
        found = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":  # other streams will write to what this one may still be using
            torch.cuda.current_stream(self.device).synchronize()
        return found

    def part(self, offset: int) -> FixedPlace:
        """The stage of one flat buffer."""
        return FixedPlace(self, offset)


class FixedPlace:
    """The place of one flat buffer on a fixed stage."""

    def __init__(self, stage: FixedWindow, offset: int) -> None:
        self.stage, self.offset = stage, offset
        self.before: Sequence[CopyEvent] = ()
        """By piece, when what was here may be overwritten."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """Its place."""
        before = [[mark] for mark in self.before] or [[] for _ in pieces]
        return WindowPlace(self.stage.memory[self.offset : self.offset + pieces[-1][1]], before, lasting=True)

    def give(self, place: WindowPlace, pieces: Sequence[Piece], marks: Sequence[CopyEvent]) -> None:
        """Its pieces are free one by one."""
        several = len(marks) == len(pieces)
        self.before = list(marks) if several else [marks[-1] if marks else self.stage.copy_streams.now()] * len(pieces)


class AllocatorWindow:
    """Memory from the allocator: a place lives as long as anybody holds a view of it, autograd for instance.

    Of what leaves, one place at a time is held until its copy is over, so that what is here is known beforehand.
    """

    def __init__(self, device: torch.device, copy_streams: CopyStreams) -> None:
        self.device, self.copy_streams = device, copy_streams
        self.leaving: tuple[torch.Tensor, Sequence[CopyEvent]] | None = None
        """Memory that is still being copied from."""

    def take(self, pieces: Sequence[Piece]) -> WindowPlace:
        """New memory."""
        self.tidy()
        memory = torch.empty(pieces[-1][1], dtype=torch.uint8, device=self.device)
        return WindowPlace(memory, [[self.copy_streams.now()]] * len(pieces))

    def give(self, place: WindowPlace, pieces: Sequence[Piece], marks: Sequence[CopyEvent]) -> None:
        """Let go of the memory when the copies are over; what left before is waited for by the computing."""
        if marks:
            for mark in self.leaving[1] if self.leaving is not None else ():
                mark.wait()
            self.leaving = place.memory, marks
        self.tidy()

    def tidy(self) -> None:
        """Let go of what was copied."""
        if self.leaving is not None and all(mark.done() for mark in self.leaving[1]):
            self.leaving = None
