"""When copies to the slower tier and back happen, and how long the device waits for them.

Copies go on beside the computing, one after the other each way. A buffer leaves when its last use in forward is over;
its memory is free after the call during which the copy ends, which may be in backward; one that leaves *early* is
waited for where forward ends, if its copy is not over by then. It starts to come back as late as it can and still be
there in time; where the link is too slow for that, the computing waits.

    compute   | F0 | F1 | F2 | F3 | B3 | B2 | B1 | B0 |
    out            | evict a | evict b |
    in                            | fetch b | fetch a |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outcore.cost.buffers import Buffer

if TYPE_CHECKING:
    from outcore.planner.keeping import Keeping

__all__ = ["Tier", "Transfer", "Transfers", "schedule_transfers"]

_AHEAD = 1.5
"""A fetch starts this much earlier than its time on the link, because predictions are not exact."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The slower memory below a device: the host's below a GPU, the disk below a CPU."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    capacity_bytes: int | None = None
    least_bytes: int = 2**20
    """Smaller buffers are not worth a copy."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One buffer's way out and back."""

    buffer: str
    evict: int
    """Position of the call after whose forward the copy starts."""
    wait: tuple[str, int]
    """Where its memory is free: after a call's forward, or before a call's backward."""
    fetch: int
    """Position of the call before whose backward it starts to come back."""
    gone_at: int
    """The first moment without its memory."""
    back_at: int
    """The first moment with its memory again."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """All copies of a step."""

    moved: tuple[Transfer, ...]
    stall_s: float
    """How long the computing waits."""
    bytes: int


def schedule_transfers(
    keeping: Keeping,
    moved: Sequence[tuple[Buffer, int]],
    recomputed: Mapping[str, tuple[int, int]],
    tier: Tier,
    early: Collection[str] = (),
) -> Transfers:
    """Place the copies.

    Args:
        keeping: the step.
        moved: buffers with the position of the call whose backward needs them first.
        recomputed: what is made again, which takes its time too.
        tier: where they go.
        early: the buffers that must be gone when forward ends.
    """
    clock = _Clock(keeping, recomputed)
    ends: dict[str, float] = {}
    free_s = 0.0
    for buffer, _ in sorted(moved, key=lambda row: row[0].last):
        start = max(free_s, clock.forward_end[buffer.last])
        free_s = ends[buffer.name] = start + buffer.bytes / tier.out_bytes_per_s
    turn_s = max((ends[name] for name in early), default=0.0) - (clock.forward_end[-1] if clock.forward_end else 0.0)
    clock.wait_at_turn(max(0.0, turn_s))
    needs = sorted(moved, key=lambda row: (-row[1], row[0].born))
    starts: dict[str, float] = {}
    later = float("inf")
    for buffer, need in reversed(needs):
        lasts = buffer.bytes / tier.in_bytes_per_s
        later = min(later, clock.backward_start[need]) - lasts
        starts[buffer.name] = max(later - (_AHEAD - 1) * lasts, ends[buffer.name])
    found, free_s, stall_s = [], 0.0, 0.0
    for buffer, need in needs:
        fetch = max(_no_later(keeping, clock.before_backward(starts[buffer.name])), need)
        begins = max(free_s, clock.backward_start[fetch] + stall_s, ends[buffer.name])
        free_s = begins + buffer.bytes / tier.in_bytes_per_s
        stall_s += max(0.0, free_s - clock.backward_start[need] - stall_s)
        out_s = min(ends[buffer.name], clock.forward_end[-1]) if buffer.name in early else ends[buffer.name]
        found.append(_transfer(keeping, clock, buffer, out_s, fetch))
    return Transfers(tuple(found), stall_s + max(0.0, turn_s), sum(b.bytes for b, _ in moved))


def _transfer(keeping: Keeping, clock: _Clock, buffer: Buffer, out_s: float, fetch: int) -> Transfer:
    position = bisect_left(clock.forward_end, out_s)
    wait: tuple[str, int]
    if position < len(clock.forward_end):
        position = max(position, buffer.last)
        wait, gone = ("forward", position), keeping.forward_at[position] + 1
    else:
        position = max(_no_earlier(keeping, clock.after_backward(out_s)), fetch)
        wait, gone = ("backward", position), keeping.backward_at[position]
    back = keeping.backward_at[fetch]
    return Transfer(buffer.name, buffer.last, wait, fetch, min(gone, back), back)


def _no_later(keeping: Keeping, position: int) -> int:
    """The call at a position, or the one before it in backward: copies start and end only where backward comes by."""
    there = keeping.differentiated
    return there[min(bisect_left(there, position), len(there) - 1)]


def _no_earlier(keeping: Keeping, position: int) -> int:
    """The call at a position, or the one after it in backward."""
    there = keeping.differentiated
    return there[max(bisect_right(there, position) - 1, 0)]


class _Clock:
    """When each call's forward ends and its backward starts, if the computing never waits."""

    def __init__(self, keeping: Keeping, recomputed: Mapping[str, tuple[int, int]]) -> None:
        self.forward_end: list[float] = []
        now = 0.0
        for seconds in keeping.forward_s:
            now += seconds
            self.forward_end.append(now)
        again = [0.0] * len(keeping.order)
        for name, (start, _) in recomputed.items():
            again[start] += keeping.buffers[name].again_s
        self.backward_start = [0.0] * len(keeping.order)
        for i in reversed(range(len(keeping.order))):
            self.backward_start[i] = now
            now += again[i] + keeping.backward_s[i]
        self._rising = self.backward_start[::-1]

    def wait_at_turn(self, seconds: float) -> None:
        """Backward starts later."""
        self.backward_start = [s + seconds for s in self.backward_start]
        self._rising = self.backward_start[::-1]

    def before_backward(self, time_s: float) -> int:
        """Position of the last call whose backward starts no later than a time."""
        return len(self._rising) - max(1, bisect_right(self._rising, time_s))

    def after_backward(self, time_s: float) -> int:
        """Position of the first call whose backward starts no earlier."""
        return len(self._rising) - 1 - min(len(self._rising) - 1, bisect_left(self._rising, time_s))
