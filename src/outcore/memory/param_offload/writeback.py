"""Trips: parameters that have room on the device leave it and come back once in every step, beside the computing.

A bucket that was updated goes home and comes straight back to where it was, piece by piece, so that both directions of
the link work at the same time. The link carries what was booked first, so the order of booking is all there is to
decide. What backward updates first is needed last: it would keep the link busy while what is needed sooner waits behind
it. So a large bucket leaves in two parts. The first keeps the link busy until bucket 1 was updated; the second follows
bucket 1.

What is updated last is needed first, at once: there is no time for a trip in between. So bucket 0 stays for the next
forward and leaves when that has come to the last bucket, where all others are back and the link would stand still until
backward has updated something. It is back when backward needs it. There is time for a little of bucket 1 as well.

    compute | use 0, 1       | use 2 | update 2 | update 1 |   ...   | update 0 | use 0  ...   | use 1 | use 2 |
    out           2b     |   | 1a 0 |         |   2a   |  1b                       |  2b   |           | 1a 0
    in            2b       | | 1a 0 |           |   2a   |  1b                       |  2b   |         | 1a 0

Whatever is computed with is here then: nothing reads or writes a part between its leaving and its return. Should a
network need one sooner than all others before it, it would still find the right bytes, because what comes back is what
was sent; and whoever writes waits (`outcore.memory.param_offload.in_flight_params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outcore.memory.offload.copy_streams import CopyStreams, Ends, RoundTripCopy
from outcore.memory.param_offload.buckets import Bucket
from outcore.memory.param_offload.flat_buffer import FlatBuffer, cut
from outcore.planner.memory.buckets import ALIGN

__all__ = ["Writebacks"]

_PIECE_BYTES, _MOST_PIECES = 16 * 2**20, 48
"""The way back is behind by a piece, but each costs the link 8 us, and the host some."""
_HALVED_BYTES = 48 * 2**20
_AT_ONCE = 0.55
"""What a larger bucket books at once."""
_BESIDE_BYTES = 12 * 2**20
"""What leaves of bucket 1 beside bucket 0: both take about as long as the link would stand still."""
_BESIDE_PIECE_BYTES = 6 * 2**20


@dataclass(frozen=True, eq=False, slots=True)
class WritebackPart:
    """Bytes of a flat buffer that leave together."""

    flat_buffer: FlatBuffer
    start: int
    end: int

    @property
    def owed(self) -> bool:
        """Whether it was updated and has not left yet."""
        return self.start in self.flat_buffer.owed

    def split(self, size: int, *, least: int) -> tuple[WritebackPart, ...]:
        """The first bytes and the others, if it is larger than that; else itself."""
        if self.end - self.start <= least:
            return (self,)
        border = self.start + size // ALIGN * ALIGN
        return WritebackPart(self.flat_buffer, self.start, border), WritebackPart(self.flat_buffer, border, self.end)


class Writeback:
    """Parts that leave one after the other and come straight back."""

    def __init__(self, parts: Sequence[WritebackPart], copy_streams: CopyStreams, piece_bytes: int) -> None:
        self.parts, self.copy_streams, self.piece_bytes = tuple(parts), copy_streams, piece_bytes
        self.turn: RoundTripCopy | None = None

    def book(self) -> None:
        """After what was computed so far."""
        if self.turn is None:
            self.turn = self.copy_streams.turn([self._ends(part) for part in self.parts])
        for part, mark in zip(self.parts, self.turn.book(), strict=True):
            part.flat_buffer.arriving.append(mark)
            part.flat_buffer.owed.discard(part.start)

    def _ends(self, part: WritebackPart) -> list[Ends]:
        flat_buffer = part.flat_buffer
        assert flat_buffer.place is not None and flat_buffer.place.lasting
        here, home = flat_buffer.place.memory, flat_buffer.home
        pieces = cut(part.start, part.end, self.piece_bytes, _MOST_PIECES)
        return [(here[a:b], home[a:b]) for a, b in pieces]


class Writebacks:
    """The trips of a model's buckets.

    Args:
        buckets: in the order in which forward needs them; those that are not trained stay where they are.
        copy streams: what copies.
    """

    def __init__(self, buckets: Iterable[Bucket], copy_streams: CopyStreams) -> None:
        self.copy_streams = copy_streams
        rows = [
            (bucket, WritebackPart(bucket.weights, 0, bucket.weights.bytes))
            for bucket in buckets
            if bucket.trained and bucket.weights
        ]
        self.before = {bucket: rows[i - 1][1].flat_buffer for i, (bucket, _) in enumerate(rows) if i}
        """Bucket -> the flat buffer that backward comes to next."""
        self.last = rows[-1][0] if len(rows) > 1 else None
        """The one that forward needs last, if there are several."""
        parts: dict[Bucket, tuple[WritebackPart, ...]] = {bucket: (whole,) for bucket, whole in rows}
        for i, (bucket, whole) in enumerate(rows):
            if i > 1:
                parts[bucket] = whole.split(int(_AT_ONCE * whole.end), least=_HALVED_BYTES)
            elif i == 1 and len(rows) > 2:
                parts[bucket] = whole.split(_BESIDE_BYTES, least=2 * _BESIDE_BYTES)
        self.parts = parts
        self.updates = {bucket: Writeback(parts[bucket][:1], copy_streams, _PIECE_BYTES) for bucket, _ in rows}
        """What leaves when a bucket was updated."""
        self.stays: Writeback | None = None
        """What stays until forward has come to the last bucket, in the order in which backward needs it."""
        if len(rows) > 1:
            (first, _), (second, _) = rows[:2]
            later = [part for bucket, _ in rows[2:] for part in parts[bucket][1:]]
            del self.updates[first]
            self.updates[second] = Writeback([parts[second][-1], *later], copy_streams, _PIECE_BYTES)
            self.stays = Writeback([*parts[second][:-1], *parts[first]], copy_streams, _BESIDE_PIECE_BYTES)
        self.alone: dict[WritebackPart, Writeback] = {}

    def updated(self, bucket: Bucket) -> None:
        """A bucket was updated, where it is."""
        assert bucket.weights is not None
        bucket.weights.owe(part.start for part in self.parts[bucket])
        if (trip := self.updates.get(bucket)) is not None:
            self._book(trip)

    def leave(self) -> list[FlatBuffer]:
        """Called when forward reaches the last bucket; returns the flat buffers that leave until backward."""
        return self._book(self.stays) if self.stays is not None else []

    def complete(self) -> None:
        """A step is over: what has not left and was not to stay leaves now, where buckets were not updated in order."""
        for trip in self.updates.values():
            self._book(trip)

    def _book(self, trip: Writeback) -> list[FlatBuffer]:
        """What is owed leaves and nothing else, which may have left for good and been written at home since."""
        owed = [part for part in trip.parts if part.owed]
        if len(owed) == len(trip.parts):
            trip.book()
        else:
            for part in owed:
                if part not in self.alone:
                    self.alone[part] = Writeback([part], self.copy_streams, trip.piece_bytes)
                self.alone[part].book()
        return list(dict.fromkeys(part.flat_buffer for part in owed))
