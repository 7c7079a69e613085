"""Write-backs: parameters that fit on the device are copied off it and back once in every step, beside the computing.

A bucket that was updated is written back and fetched again to where it was, piece by piece, so that both directions of
the link are busy at the same time. The link runs copies in the order in which they were started, so that order is all
there is to decide. What backward updates first is needed last: it would keep the link busy while what is needed sooner
waits behind it. So a large bucket is written back in two parts. The first keeps the link busy until bucket 1 was
updated; the second follows bucket 1.

What is updated last is needed first, at once: there is no time for a round trip in between. So bucket 0 stays for the
next forward and is written back when forward has reached the last bucket: all others are back by then, and the link
would be idle until backward has updated something. It is back when backward needs it. There is time for a little of
bucket 1 as well.

    compute | use 0, 1       | use 2 | update 2 | update 1 |   ...   | update 0 | use 0  ...   | use 1 | use 2 |
    out           2b     |   | 1a 0 |         |   2a   |  1b                       |  2b   |           | 1a 0
    in            2b       | | 1a 0 |           |   2a   |  1b                       |  2b   |         | 1a 0

Nothing reads or writes a part while its round trip is under way. Should a network need one sooner than all others
before it, it would still find the right bytes, because what is fetched is what was written back; and whoever writes
waits (`outcore.memory.param_offload.in_flight_params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outcore.memory.offload.copy_streams import CopyStreams, Ends, RoundTripCopy
from outcore.memory.param_offload.buckets import Bucket
from outcore.memory.param_offload.flat_buffer import FlatBuffer, cut
from outcore.planner.memory.buckets import ALIGN

_PIECE_BYTES, _MOST_PIECES = 16 * 2**20, 48
"""The fetch is one piece behind the write-back, but each piece costs the link 8 us, and the host some."""
_HALVED_BYTES = 48 * 2**20
_AT_ONCE = 0.55
"""The share of a larger bucket that is written back as soon as it was updated."""
_BESIDE_BYTES = 12 * 2**20
"""How much of bucket 1 is written back beside bucket 0: both take about as long as the link would be idle."""
_BESIDE_PIECE_BYTES = 6 * 2**20


@dataclass(frozen=True, eq=False, slots=True)
class WritebackPart:
    """Bytes of a flat buffer that are written back together."""

    flat_buffer: FlatBuffer
    start: int
    end: int

    @property
    def pending(self) -> bool:
        """Whether it was updated and is not written back yet."""
        return self.start in self.flat_buffer.pending

    def split(self, size: int, *, least: int) -> tuple[WritebackPart, ...]:
        """The first `size` bytes and the others, if it has more than `least`; else itself."""
        if self.end - self.start <= least:
            return (self,)
        border = self.start + size // ALIGN * ALIGN
        return WritebackPart(self.flat_buffer, self.start, border), WritebackPart(self.flat_buffer, border, self.end)


class Writeback:
    """Parts that are copied off the device one after the other, and straight back."""

    def __init__(self, parts: Sequence[WritebackPart], copy_streams: CopyStreams, piece_bytes: int) -> None:
        self.parts, self.copy_streams, self.piece_bytes = tuple(parts), copy_streams, piece_bytes
        self.round_trip: RoundTripCopy | None = None

    def start(self) -> None:
        """Start the copies, after what was computed so far."""
        if self.round_trip is None:
            self.round_trip = self.copy_streams.round_trip([self._ends(part) for part in self.parts])
        for part, event in zip(self.parts, self.round_trip.start(), strict=True):
            part.flat_buffer.copies_in.append(event)
            part.flat_buffer.pending.discard(part.start)

    def _ends(self, part: WritebackPart) -> list[Ends]:
        flat_buffer = part.flat_buffer
        assert flat_buffer.place is not None and flat_buffer.place.lasting
        on_device, off_device = flat_buffer.place.memory, flat_buffer.off_device
        pieces = cut(part.start, part.end, self.piece_bytes, _MOST_PIECES)
        return [(on_device[a:b], off_device[a:b]) for a, b in pieces]


class Writebacks:
    """When each bucket of a model is written back.

    Args:
        buckets: in the order in which forward needs them; those that are not trained are never written back.
        copy_streams: what copies.
    """

    def __init__(self, buckets: Iterable[Bucket], copy_streams: CopyStreams) -> None:
        self.copy_streams = copy_streams
        rows = [
            (bucket, WritebackPart(bucket.weights, 0, bucket.weights.bytes))
            for bucket in buckets
            if bucket.trained and bucket.weights
        ]
        self.previous = {bucket: rows[i - 1][1].flat_buffer for i, (bucket, _) in enumerate(rows) if i}
        """Bucket -> the flat buffer that backward needs next."""
        self.last = rows[-1][0] if len(rows) > 1 else None
        """The bucket that forward needs last, if there are several."""
        parts: dict[Bucket, tuple[WritebackPart, ...]] = {bucket: (whole,) for bucket, whole in rows}
        for i, (bucket, whole) in enumerate(rows):
            if i > 1:
                parts[bucket] = whole.split(int(_AT_ONCE * whole.end), least=_HALVED_BYTES)
            elif i == 1 and len(rows) > 2:
                parts[bucket] = whole.split(_BESIDE_BYTES, least=2 * _BESIDE_BYTES)
        self.parts = parts
        self.after_update = {bucket: Writeback(parts[bucket][:1], copy_streams, _PIECE_BYTES) for bucket, _ in rows}
        """Bucket -> what is written back when it was updated."""
        self.delayed: Writeback | None = None
        """What stays until forward has reached the last bucket, in the order in which backward needs it."""
        if len(rows) > 1:
            (first, _), (second, _) = rows[:2]
            later = [part for bucket, _ in rows[2:] for part in parts[bucket][1:]]
            del self.after_update[first]
            self.after_update[second] = Writeback([parts[second][-1], *later], copy_streams, _PIECE_BYTES)
            self.delayed = Writeback([*parts[second][:-1], *parts[first]], copy_streams, _BESIDE_PIECE_BYTES)
        self.single_parts: dict[WritebackPart, Writeback] = {}

    def updated(self, bucket: Bucket) -> None:
        """Note that a bucket was updated, and start what follows from that."""
        assert bucket.weights is not None
        bucket.weights.mark_updated(part.start for part in self.parts[bucket])
        if (writeback := self.after_update.get(bucket)) is not None:
            self._start(writeback)

    def start_delayed(self) -> list[FlatBuffer]:
        """Start what was delayed, when forward reaches the last bucket; returns the flat buffers that are in flight
        until backward."""
        return self._start(self.delayed) if self.delayed is not None else []

    def start_remaining(self) -> None:
        """Start what is left at the end of a step, where buckets were not updated in their order."""
        for writeback in self.after_update.values():
            self._start(writeback)

    def _start(self, writeback: Writeback) -> list[FlatBuffer]:
        """Write back the parts that are pending and no others, which may have been evicted and written off the device
        since."""
        pending = [part for part in writeback.parts if part.pending]
        if len(pending) == len(writeback.parts):
            writeback.start()
        else:
            for part in pending:
                if part not in self.single_parts:
                    self.single_parts[part] = Writeback([part], self.copy_streams, writeback.piece_bytes)
                self.single_parts[part].start()
        return list(dict.fromkeys(part.flat_buffer for part in pending))
