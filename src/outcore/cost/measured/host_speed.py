"""How fast the host is at the moment.

The launch time of a call is measured once and used later, and the speed of the host changes: clocks change, and on a
shared or virtual machine a neighbour takes half of a core for a second. On one such machine making the same view took 7
and 15 microseconds in measurements a second apart. What does not change is how the work of one call compares to that of
another. So beside every measurement of a launch a fixed piece of host work is timed, the *reference work*; launch times
are compared in units of it, and turned back into seconds at the speed of an undisturbed host: the reference time that a
tenth of those measured go below. A spell of slow measurements belongs to the core it was measured on; a step may run on
another.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from outcore.machine.clock import TimedRuns

_VIEWS = 40
_TRIES = 3


def reference_work_s() -> float:
    """Seconds of a fixed piece of work that only the host does: views of a small tensor, recorded by autograd."""
    tensor = torch.ones(4, requires_grad=True, device="cpu")
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        for _ in range(_VIEWS):
            tensor.view(2, 2)
        times.append(time.perf_counter() - start)
    return min(times)


class HostSpeed:
    """The reference times of one measurement, beside which launch times were taken."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @property
    def reference_s(self) -> float:
        """The time of the reference work on an undisturbed host; 0 before the first measurement."""
        if len(self.seen) < 2:
            return sum(self.seen)
        return statistics.quantiles(self.seen, n=10, method="inclusive")[0]

    def counted(self, timing: TimedRuns, before_s: float) -> TimedRuns:
        """A timing that was just taken, its launch time in units of the reference work; `before_s` is the reference
        time before it."""
        reference = (before_s + reference_work_s()) / 2
        self.seen.append(reference)
        return replace(timing, dispatch_s=timing.dispatch_s / reference)

    def in_seconds(self, timing: TimedRuns | None) -> TimedRuns | None:
        """A counted timing with its launch time at the undisturbed speed."""
        return replace(timing, dispatch_s=timing.dispatch_s * self.reference_s) if timing is not None else None
