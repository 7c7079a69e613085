"""Timing one operation on any device.

A GPU works behind the interpreter's back, so a wall clock around a call measures the issuing, not the doing.
CUDA events measure the doing, but between short kernels they also measure the wait for the interpreter. Here
the stream is first held by a spinning kernel; the calls are issued behind it, and the device then runs them
without gaps:

    host    | spin | issue issue issue |
    device         | spin ............. | run run run |      events around the runs

The time to issue is measured too, on the host's clock, because a network of tiny operations is bound by it.
On a CPU there is one clock and no second number; with one thread it can be the thread's own time, which other
programs on a shared computer do not lengthen. There the first runs of a large operation also pay for pages of memory
that the system has to find and clear: the heap grows until it has room for what a run holds at once, over ten runs and
more, and a gradient of 16 MiB took 58 ms with new pages and 9 ms in the memory of the run before, as in every step but
the first. So runs that were given clearly more new pages than others do not count.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

try:
    import resource
except ImportError:  # not on this system: every run counts
    resource = None  # type: ignore[assignment]

__all__ = ["TimedRuns", "clock_for", "synchronize", "tf32", "time_calls", "wall_s"]

_SPIN_CYCLES_PER_S = 2.0e9
_FEW_PAGES = 16
"""New pages of memory that a run may be given beyond the run with the fewest: some microseconds each."""
_BLOCKED = 2.0
"""So many times as long as the shortest: then a call was not only issued, but waited for room in the device's queue."""


@dataclass(frozen=True, slots=True)
class TimedRuns:
    """What several runs of one thing took, in seconds."""

    min_s: float
    median_s: float
    max_s: float
    mean_s: float
    runs: int
    dispatch_s: float = 0.0
    """Median time the host needed to issue it; 0 on a CPU, where it is part of the others."""
    lead_s: float = 0.0
    """Of that, what passes before the device has anything to do; 0 where it is not known."""

    @classmethod
    def of(cls, samples: Sequence[float], *, dispatch_s: float = 0.0) -> TimedRuns:
        """The four statistics of a list of times."""
        return cls(
            min(samples),
            statistics.median(samples),
            max(samples),
            statistics.fmean(samples),
            len(samples),
            dispatch_s,
        )

    def less(self, other: TimedRuns) -> TimedRuns:
        """This time without another that is part of it."""
        part, issuing = other.median_s, other.dispatch_s
        return replace(
            self,
            min_s=max(0.0, self.min_s - part),
            median_s=max(0.0, self.median_s - part),
            max_s=max(0.0, self.max_s - part),
            mean_s=max(0.0, self.mean_s - part),
            dispatch_s=max(0.0, self.dispatch_s - issuing),
        )

    def longer(self, extra_s: float) -> TimedRuns:
        """The time with so much more on the device; the host issues it in the same time."""
        return replace(
            self,
            min_s=self.min_s + extra_s,
            median_s=self.median_s + extra_s,
            max_s=self.max_s + extra_s,
            mean_s=self.mean_s + extra_s,
        )

    def scaled(self, scale: float) -> TimedRuns:
        """The time of so many times as much; the host issues it in the same time."""
        return replace(
            self,
            min_s=self.min_s * scale,
            median_s=self.median_s * scale,
            max_s=self.max_s * scale,
            mean_s=self.mean_s * scale,
        )


class tf32:  # noqa: N801  (reads as a word: `with tf32(True):`)
    """Turns TF32 on or off for matrix products and convolutions, and puts back what was set."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.before = (False, False)

    def __enter__(self) -> None:
        self.before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
        torch.backends.cuda.matmul.allow_tf32 = self.allowed
        torch.backends.cudnn.allow_tf32 = self.allowed

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.before


def clock_for(device: torch.device) -> Callable[[], float]:
    """On a CPU with one thread, the thread's own time: the same on an idle machine, and right on a busy one."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def time_calls(
    call: Callable[[], object],
    device: torch.device | str,
    *,
    seconds: float = 0.1,
    warmup: int = 2,
    least: int = 3,
    most: int = 50,
    clock: Callable[[], float] = time.perf_counter,
    between: Callable[[], object] | None = None,
) -> TimedRuns:
    """Time `call` on `device` for about `seconds`, after `warmup` runs that are not counted.

    `between` is run before every timed run and is not part of its time.

    >>> x = torch.ones(8, 8)
    >>> time_calls(lambda: x @ x, "cpu", seconds=0.001).runs >= 1
    True
    """
    if torch.device(device).type == "cuda":
        return _time_cuda(call, torch.device(device), seconds, warmup, least, most, between or _nothing)
    begin = clock()
    call()
    if clock() - begin > seconds:
        warmup, least = 1, 1  # one run fills the time, and has warmed what there is to warm
    for _ in range(warmup - 1):
        call()
    samples: list[float] = []
    pages: list[int] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or (time.perf_counter() < end and len(samples) < most):
        if between is not None:
            between()
        given = _pages()
        start = clock()
        call()
        samples.append(clock() - start)
        pages.append(_pages() - given)
    allowed = max(min(pages) + _FEW_PAGES, min(pages) * 9 // 8)
    return TimedRuns.of([took for took, new in zip(samples, pages, strict=True) if new <= allowed])


def _pages() -> int:
    """How many new pages of memory the system has given to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource is not None else 0


def _nothing() -> None:
    pass


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given; a CPU has done so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds from a call, on a device that waits for it, until the device has done its work."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


@functools.cache
def _empty_s(device: str) -> float:
    """What lies between two events with nothing between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    torch.cuda._sleep(int(200e-6 * _SPIN_CYCLES_PER_S))
    for mark in marks:
        mark.record()
    torch.cuda.synchronize()
    return 1e-3 * float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)))


def _time_cuda(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    warmup: int,
    least: int,
    most: int,
    between: Callable[[], object],
) -> TimedRuns:
    with torch.cuda.device(device):
        for _ in range(warmup):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        between()
        torch.cuda.synchronize()
        issuing = time.perf_counter()
        call()
        dispatch = time.perf_counter() - issuing
        torch.cuda.synchronize()
        once = time.perf_counter() - start
        runs = max(least, min(most, int(seconds / once)))
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        issued: list[float] = []
        torch.cuda._sleep(int(min(1.5 * dispatch * runs + 50e-6, 0.05) * _SPIN_CYCLES_PER_S))
        for begin, end in marks:
            between()
            begin.record()
            start = time.perf_counter()
            call()
            issued.append(time.perf_counter() - start)
            end.record()
        torch.cuda.synchronize()
        empty_s = 1.5 * _empty_s(str(device))
        samples = [begin.elapsed_time(end) * 1e-3 for begin, end in marks]
        samples = [sample if sample > empty_s else 0.0 for sample in samples]  # a view runs no kernel
    return TimedRuns.of(samples, dispatch_s=_issue_s(issued, dispatch))


def _issue_s(issued: Sequence[float], alone_s: float) -> float:
    """Seconds of a host for a call, of runs that were issued one after the other and of one on a device with nothing
    to do. The queue of a device is finite, and short where processes share it (MPS): once it is full the host waits for
    the device, and the runs say what that takes; those that still found room say what the call takes."""
    middle, least = statistics.median(issued), min(alone_s, *issued)
    return least if middle > _BLOCKED * least else middle
