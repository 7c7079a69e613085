"""How much memory a rank holds over time: entries in, one curve and one peak out.

Entries of one moment are taken in the order in which they were made, except that what a transfer or copy frees comes
first: an instruction that begins when another ends finds the memory that one left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outcore.documents.schema import ListOf, Number, Whole
from outcore.documents.typed_schema import Row

PARTS = ("parameters", "gradients", "state", "saved", "buffers", "workspace")
"""What memory is held for: `saved` for backward, `buffers` for values that are sent between stages."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank over a step.

    >>> memory = MemoryLedger()
    >>> memory.add(0.0, "saved", 4), memory.add(1.0, "saved", -4), memory.add(1.0, "saved", 3)
    (None, None, None)
    >>> memory.curve().peak_bytes, memory.curve().bytes
    (4, (4, 3))
    """

    times_s: tuple[float, ...]
    bytes: tuple[int, ...]
    """What is held from each time on, until the next."""
    peak_bytes: int
    peak_s: float
    peak_parts: tuple[int, ...]
    """What each of `PARTS` holds at the peak."""

    def parts(self) -> dict[str, int]:
        """What each part holds at the peak, by name."""
        return dict(zip(PARTS, self.peak_parts, strict=True))

    def ending_with(self, parts: Sequence[int]) -> RankMemory:
        """The curve with other parts in its last moment, which may be its peak."""
        curve = replace(self, bytes=(*self.bytes[:-1], sum(parts)))
        if sum(parts) <= self.peak_bytes:
            return curve
        return replace(curve, peak_bytes=sum(parts), peak_s=self.times_s[-1], peak_parts=tuple(parts))

    def to_json(self) -> list[Any]:
        """The curve as plain lists and numbers."""
        return [list(self.times_s), list(self.bytes), self.peak_bytes, self.peak_s, list(self.peak_parts)]

    @classmethod
    def from_json(cls, row: list[Any]) -> RankMemory:
        """The curve that `to_json` wrote."""
        return cls(tuple(row[0]), tuple(row[1]), row[2], row[3], tuple(row[4]))


CURVE = Row(
    (
        ("times", ListOf(Number())),
        ("bytes", ListOf(Whole())),
        ("peak bytes", Whole()),
        ("time of the peak", Number()),
        ("parts of the peak", ListOf(Whole(), len(PARTS), len(PARTS))),
    ),
    5,
)
"""A saved curve."""


class MemoryLedger:
    """The entries of one rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int, int, int]] = []

    def add(self, time_s: float, part: str, nbytes: int, *, first: bool = False) -> None:
        """Hold `nbytes` more (or less, when negative) from `time_s` on; `first` of all entries of that time."""
        if nbytes:
            self._entries.append((time_s, 0 if first else 1, len(self._entries), PARTS.index(part), nbytes))

    def curve(self) -> RankMemory:
        """All entries as a curve."""
        times: list[float] = []
        held: list[int] = []
        now, total, peak, peak_s = [0] * len(PARTS), 0, 0, 0.0
        peak_parts = tuple(now)
        for time_s, _, _, part, nbytes in sorted(self._entries):
            now[part] += nbytes
            total += nbytes
            if total > peak:
                peak, peak_s, peak_parts = total, time_s, tuple(now)
            if times and times[-1] == time_s:
                held[-1] = total
            else:
                times.append(time_s)
                held.append(total)
        return RankMemory(tuple(times), tuple(held), peak, peak_s, peak_parts)
