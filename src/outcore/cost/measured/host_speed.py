"""How fast the host is at the moment.

The time to issue a call is measured once and used later, and the host does not keep its pace: clocks change, and on a
shared or virtual machine a neighbour takes half of a core for a second. On one such machine making the same view took
7 and 15 microseconds in measurements a second apart. What does not change is how the work of one call compares to that
of another. So beside every measurement of issuing a fixed piece of host work is timed, the *beat*; times are
compared in beats, and turned back into seconds at the pace of a host that nobody disturbs: the beat that a tenth of
those seen go below. A spell of slow beats belongs to the core it was measured on; a step may run on another.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from outcore.machine.clock import TimedRuns

__all__ = ["HostSpeed", "beat_s"]

_VIEWS = 40
_TRIES = 3


def beat_s() -> float:
    """Seconds of a fixed piece of work that only the host does: views of a small tensor, recorded by autograd."""
    tensor = torch.ones(4, requires_grad=True)
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        for _ in range(_VIEWS):
            tensor.view(2, 2)
        times.append(time.perf_counter() - start)
    return min(times)


class HostSpeed:
    """The beats of one measurement, beside which times were taken."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @property
    def pace_s(self) -> float:
        """The beat of the host when nobody disturbs it; 0 before the first."""
        if len(self.seen) < 2:
            return sum(self.seen)
        return statistics.quantiles(self.seen, n=10, method="inclusive")[0]

    def counted(self, timing: TimedRuns, before_s: float) -> TimedRuns:
        """A timing that was just taken, its issuing in beats; `before_s` is the beat before it."""
        beat = (before_s + beat_s()) / 2
        self.seen.append(beat)
        return replace(timing, dispatch_s=timing.dispatch_s / beat)

    def in_seconds(self, timing: TimedRuns | None) -> TimedRuns | None:
        """A counted timing with its issuing at the undisturbed pace."""
        return replace(timing, dispatch_s=timing.dispatch_s * self.pace_s) if timing is not None else None
