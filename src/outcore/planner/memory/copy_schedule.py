"""When copies to the slower tier and back happen, and how long the device waits for them.

Copies go on beside the computing, one after the other each way. A buffer leaves when its last use in forward is over;
its memory is free after the call during which the copy ends, which may be in backward; one that leaves *early* is
waited for where forward ends, if its copy is not over by then. It starts to come back as late as it can and still be
there in time; where the link is too slow for that, the computing waits. What has no room on the host goes on to the
disk (`outcore.planner.memory.disk_overflow`).

    compute   | F0 | F1 | F2 | F3 | B3 | B2 | B1 | B0 |
    out            | evict a | evict b |
    in                            | fetch b | fetch a |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from outcore.cost.buffers import Buffer
from outcore.errors import MachineError
from outcore.machine import Machine
from outcore.planner.memory.disk_overflow import DiskOverflow

if TYPE_CHECKING:
    from outcore.planner.memory.evaluate import StepModel

_AHEAD = 1.5
"""A fetch starts this much earlier than its time on the link, because predictions are not exact."""


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """The slower memory below a device: the host's below a GPU, the disk below a CPU."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    capacity_bytes: int | None = None
    """Its room; none where that is not known."""
    least_bytes: int = 2**20
    """Smaller buffers are not worth a copy."""
    beyond: OffloadTarget | None = None
    """Where goes what has no room."""


@dataclass(frozen=True, slots=True)
class BufferCopies:
    """When one buffer is copied off the device and back."""

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
class CopySchedule:
    """When all offloaded buffers of a step are copied, and what the device waits for them."""

    moved: tuple[BufferCopies, ...]
    stall_s: float
    """How long the computing waits; for ever, where there is no room for all."""
    bytes: int
    further_bytes: int = 0
    """Of them, what goes on to the disk."""


def schedule_transfers(
    keeping: StepModel,
    moved: Sequence[tuple[Buffer, int]],
    recomputed: Mapping[str, tuple[int, int]],
    tier: OffloadTarget,
    early: Collection[str] = (),
) -> CopySchedule:
    """Place the copies.

    Args:
        keeping: the step.
        moved: buffers with the position of the call whose backward needs them first.
        recomputed: what is made again, which takes its time too.
        tier: where they go.
        early: the buffers that must be gone when forward ends.
    """
    size = sum(buffer.bytes for buffer, _ in moved)
    full = tier.capacity_bytes is not None and size > tier.capacity_bytes
    if full and tier.beyond is None:
        return CopySchedule((), float("inf"), size)
    clock = _Clock(keeping, recomputed)
    leaving = [buffer for buffer, _ in sorted(moved, key=lambda row: row[0].last)]
    overflow = DiskOverflow(leaving, tier.capacity_bytes or 0, tier.beyond) if full and tier.beyond else None
    ends: dict[str, float] = {}
    free_s = 0.0
    for buffer in leaving:
        start = max(free_s, clock.forward_end[buffer.last])
        if overflow is not None:
            start = overflow.admit(buffer, start)
        free_s = ends[buffer.name] = start + buffer.bytes / tier.out_bytes_per_s
        if overflow is not None:
            overflow.left(buffer, free_s)
    turn_s = max((ends[name] for name in early), default=0.0) - (clock.forward_end[-1] if clock.forward_end else 0.0)
    turn_s = max(0.0, turn_s, overflow.waited_s if overflow is not None else 0.0)
    clock.wait_at_turn(turn_s)
    needs = sorted(moved, key=lambda row: (-row[1], row[0].born))
    starts: dict[str, float] = {}
    later = float("inf")
    for buffer, need in reversed(needs):
        lasts = buffer.bytes / tier.in_bytes_per_s
        later = min(later, clock.backward_start[need]) - lasts
        starts[buffer.name] = max(later - (_AHEAD - 1) * lasts, ends[buffer.name])
    if overflow is not None:
        overflow.turn(clock.backward_start[-1])
    found, free_s, stall_s = [], 0.0, 0.0
    before = len(keeping.order)
    for buffer, need in needs:
        ready_s = overflow.ready(buffer) if overflow is not None else 0.0
        fetch = max(_no_later(keeping, clock.before_backward(max(starts[buffer.name], ready_s - stall_s))), need)
        before = fetch = min(fetch, before)  # the link is first come, first served: what is needed first is asked first
        begins = max(free_s, clock.backward_start[fetch] + stall_s, ends[buffer.name], ready_s)
        free_s = begins + buffer.bytes / tier.in_bytes_per_s
        stall_s += max(0.0, free_s - clock.backward_start[need] - stall_s)
        if overflow is not None:
            overflow.returned(buffer, free_s)
        out_s = min(ends[buffer.name], clock.forward_end[-1]) if buffer.name in early else ends[buffer.name]
        found.append(_transfer(keeping, clock, buffer, out_s, fetch))
    further = sum(b.bytes for b in leaving if b.name in overflow.further) if overflow is not None else 0
    return CopySchedule(tuple(found), stall_s + turn_s, size, further)


def _transfer(keeping: StepModel, clock: _Clock, buffer: Buffer, out_s: float, fetch: int) -> BufferCopies:
    position = bisect_left(clock.forward_end, out_s)
    wait: tuple[str, int]
    if position < len(clock.forward_end):
        position = max(position, buffer.last)
        wait, gone = ("forward", position), keeping.forward_at[max(position, buffer.held)] + 1
    else:
        position = max(_no_earlier(keeping, clock.after_backward(out_s)), fetch)
        wait, gone = ("backward", position), keeping.backward_at[position]
    back = keeping.backward_at[fetch]
    return BufferCopies(buffer.name, buffer.last, wait, fetch, min(gone, back), back)


def _no_later(keeping: StepModel, position: int) -> int:
    """The call at a position, or the one before it in backward: copies start and end only where backward comes by."""
    there = keeping.differentiated
    return there[min(bisect_left(there, position), len(there) - 1)]


def _no_earlier(keeping: StepModel, position: int) -> int:
    """The call at a position, or the one after it in backward."""
    there = keeping.differentiated
    return there[max(bisect_right(there, position) - 1, 0)]


class _Clock:
    """When each call's forward ends and its backward starts, if the computing never waits."""

    def __init__(self, keeping: StepModel, recomputed: Mapping[str, tuple[int, int]]) -> None:
        self.forward_end = keeping.forward_ends
        again = keeping.backward_s.copy()
        for name, (start, _) in recomputed.items():
            again[start] += keeping.buffers[name].again_s
        begins = self.forward_end[-1] if self.forward_end else 0.0
        self._rising = list(accumulate(reversed(again[1:]), initial=begins)) if again else []
        self.backward_start = self._rising[::-1]

    def wait_at_turn(self, seconds: float) -> None:
        """Let backward start so many seconds later, because a copy has to end first."""
        self.backward_start = [s + seconds for s in self.backward_start]
        self._rising = self.backward_start[::-1]

    def before_backward(self, time_s: float) -> int:
        """Position of the last call whose backward starts no later than a time."""
        return len(self._rising) - max(1, bisect_right(self._rising, time_s))

    def after_backward(self, time_s: float) -> int:
        """Position of the first call whose backward starts no earlier."""
        return len(self._rising) - 1 - min(len(self._rising) - 1, bisect_left(self._rising, time_s))


HOST_SHARE = 0.8
"""Share of the host's memory that values of a device may take."""


def tier_of(machine: Machine) -> OffloadTarget | None:
    """Where the first device's values can be offloaded to: the host, and the disk beyond it; none if that is not known.

    >>> from outcore.machine import parse
    >>> target = tier_of(parse("h100"))
    >>> target is not None and target.out_bytes_per_s > 1e9
    True
    """
    device = machine.devices[0]
    try:
        link = machine.below(device)
    except MachineError:
        return None
    # Copies share the memory and, both ways at once, the bus.
    both = link.both_bytes_per_s / (link.away_bytes_per_s + link.back_bytes_per_s)
    rates = (both * link.away_bytes_per_s, both * link.back_bytes_per_s)
    if device.kind != "cuda" or machine.host is None:
        return OffloadTarget(*rates)
    disk = None
    if machine.disk is not None:
        disk = OffloadTarget(machine.disk.away_bytes_per_s, machine.disk.back_bytes_per_s)
    return OffloadTarget(*rates, int(HOST_SHARE * machine.host.memory_bytes), beyond=disk)
