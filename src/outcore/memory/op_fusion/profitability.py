"""Which batch norms become one operation with their ReLU.

Fused, a norm passes over memory eight times in a step instead of thirteen, and its statistics are not left to one
multiprocessor per channel. But it is launched from Python, which takes the host several times as long as torch's own. A
step takes as long as the slower of the two: the host, which launches it, and the device, which computes it. So those
norms are fused that save the device most, as long as the host keeps ahead:

    norms fused      0 ──────────────▶ all, those that save most first
    device           ─ falls ─▶
    host             ─ rises ─▶        take the number at which the slower of the two is fastest

The host's part of that is an estimate. Where the first steps are slower than they should be with the library's norms,
those are timed for as many steps, and the faster way stays (`AbTest`). On a CPU the host is the device, and every norm
is fused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outcore.cost.costs import CallCost, Costs
from outcore.machine.clock import TimedRuns
from outcore.machine.units import format_time

if TYPE_CHECKING:
    from outcore.memory.saved_tensors.peak_monitor import MeasuredStep
    from outcore.memory.saved_tensors.settings import PlannedCall

Norms = Mapping[str, str | None]
"""Call of a norm -> call of the ReLU that is the only reader of its output, if there is one."""

_FORWARD, _BACKWARD = 3, 5
"""Passes over memory of a fused norm."""
RATE = 0.8
"""The share of a copy's rate that the kernels reach."""
_ISSUE = 4.0
"""Host time of a fused norm over that of torch's norm and ReLU: an estimate; the first steps show where it is wrong."""


def worth_fusing(
    norms: Norms, costs: Costs, memory_bytes_per_s: float, *, issued: bool = True
) -> dict[str, str | None]:
    """The norms to fuse.

    Args:
        norms: those that can be.
        costs: of the graph; where the host's time was not measured, all are worth it.
        memory_bytes_per_s: of the device.
        issued: the host issues them one by one; else they are part of a CUDA graph, and it does not count.
    """
    rows = list(norms.items())
    saved = {name: _saved_s(name, relu, costs, memory_bytes_per_s) for name, relu in rows}
    added = {name: (_ISSUE - 1) * sum(t.dispatch_s for t in _times(name, relu, costs)) for name, relu in rows}
    taken = ahead(saved, added, costs, issued=issued)
    return {name: relu for name, relu in rows if name in taken}


def ahead(saved: Mapping[str, float], added: Mapping[str, float], costs: Costs, *, issued: bool) -> set[str]:
    """Those that save the device most, as long as the host keeps ahead.

    Args:
        saved: seconds of the device that each saves.
        added: seconds of the host that each takes more; where none is known, all are worth it.
        costs: of the graph without them.
        issued: the host issues them one by one; else its time does not count.
    """
    if not issued:
        return {name for name, seconds in saved.items() if seconds > 0}
    if not any(added.values()):
        return set(saved)
    device_s, host_s = totals(costs)
    rows = sorted(saved, key=lambda name: -saved[name])
    best, count = max(device_s, host_s), 0
    for i, name in enumerate(rows):
        device_s -= saved[name]
        host_s += added[name]
        if max(device_s, host_s) <= best:
            best, count = max(device_s, host_s), i + 1
    return set(rows[:count])


def less(timing: TimedRuns | None, seconds: float) -> TimedRuns | None:
    """A timing that is shorter by so many seconds, but keeps at least half."""
    if timing is None or not seconds:
        return timing
    return TimedRuns.of([max(0.5 * timing.median_s, timing.median_s - seconds)], dispatch_s=timing.dispatch_s)


def as_fused(costs: Costs, norms: Norms, memory_bytes_per_s: float) -> Costs:
    """Costs in which norms are fused: their ReLUs take no time and save nothing."""
    nothing = TimedRuns.of([0.0])
    calls = dict(costs.calls)
    for name, relu in norms.items():
        calls[name] = _fused(calls[name], memory_bytes_per_s)
        if relu is not None:
            cost = calls[relu]
            backward = nothing if cost.backward is not None else None
            calls[relu] = replace(cost, forward=nothing, backward=backward, saved=())
    return replace(costs, calls=calls)


def step_s(costs: Costs) -> float:
    """Seconds of a step with all norms as they are: the slower of device and host."""
    return max(totals(costs))


def totals(costs: Costs) -> tuple[float, float]:
    """Seconds of a step on the device and on the host."""
    times = [t for c in costs.calls.values() for t in (c.forward, c.backward) if t is not None]
    host = sum(t.dispatch_s for t in times) + len(times) * costs.between_s + costs.start_s
    return sum(t.median_s for t in times), host


def _saved_s(name: str, relu: str | None, costs: Costs, rate: float) -> float:
    """Seconds of the device that fusing saves."""
    now = sum(t.median_s for t in _times(name, relu, costs))
    return now - (_FORWARD + _BACKWARD) * costs.calls[name].output_bytes / (RATE * rate)


def _times(name: str, relu: str | None, costs: Costs) -> list[TimedRuns]:
    calls = [costs.calls[call] for call in (name, relu) if call is not None]
    return [t for c in calls for t in (c.forward, c.backward) if t is not None]


def _fused(cost: CallCost, rate: float) -> CallCost:
    """The cost of a fused norm; on a CPU it is left as it is."""
    if cost.forward is None or not cost.forward.dispatch_s:
        return cost
    second = cost.output_bytes / (RATE * rate)

    def timing(now: TimedRuns | None, passes: int) -> TimedRuns | None:
        if now is None:
            return None
        seconds = min(now.median_s, passes * second)
        return TimedRuns.of([seconds], dispatch_s=_ISSUE * now.dispatch_s)

    return replace(cost, forward=timing(cost.forward, _FORWARD), backward=timing(cost.backward, _BACKWARD))


_SLOWER = 1.05
"""Fused norms are tested if a step takes so many times as long as it should with the library's."""


class AbTest:
    """Tries the library's norms against the fused ones, for each way of calling a model, and keeps the faster."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, tuple[PlannedCall, float]] = {}
        """Calls with fused norms, and their time, while the library's norms are timed."""
        self.times: dict[Hashable, tuple[float, float]] = {}
        """Seconds of a step with fused norms and with the library's, where both were timed."""

    def wanted(self, entry: PlannedCall, seen: MeasuredStep) -> bool:
        """Whether steps with fused norms are slower than predicted, so that a test is wanted."""
        return entry.merged and seen.step_s > _SLOWER * entry.library_s

    def begin(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> None:
        """Keep the time with fused norms and switch to the library's."""
        self.waiting[key] = entry, seen.step_s

    def end(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> PlannedCall:
        """Compare with the time of the library's norms; returns the entry that stays."""
        fused, fused_s = self.waiting.pop(key)
        self.times[key] = fused_s, seen.step_s
        return fused if fused_s < seen.step_s else entry

    def outcome(self, key: Hashable) -> str:
        """The outcome in words, for the plan's explanation."""
        fused, library = map(format_time, self.times[key])
        return f"fused norms take {fused} a step, the library's {library}; the faster ones stay"
