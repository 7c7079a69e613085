"""The most that a piece of work held, by whoever counts on its device.

On a GPU that is the caching allocator, and what counts is what it had to reserve. On a CPU nobody counts all the time;
torch's profiler reports every allocation and every release, also those of compiled kernels, and their running sum is
the curve.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from outcore.machine.clock import wall_s
from outcore.memory.cuda_graphs.pool import give_back

__all__ = ["measured_peak", "standing_bytes", "step_seconds"]

_LOG_LEVEL = "KINETO_LOG_LEVEL"


def standing_bytes(device: torch.device) -> int:
    """What is in use on a GPU now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    give_back()
    return torch.cuda.memory_allocated(device)


def measured_peak(run: Callable[[], object], device: torch.device, standing: int = 0) -> int:
    """The bytes that `run` takes at its peak.

    Args:
        run: the work.
        device: where it runs.
        standing: on a GPU, what was there before anything of this work was; on a CPU what is there when it begins does
            not count.
    """
    return _on_cuda(run, device, standing) if device.type == "cuda" else _on_cpu(run)


def _on_cuda(run: Callable[[], object], device: torch.device, standing: int) -> int:
    torch.cuda.synchronize(device)
    give_back()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_reserved(device) - standing)


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """torch's profiler prints a line when it begins and one when it ends, unless its level of logs is above all."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
        else:
            os.environ[_LOG_LEVEL] = before


def _on_cpu(run: Callable[[], object]) -> int:
    with _quiet_profiler(), torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as watched:
        run()
    results = watched.kineto_results
    assert results is not None
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def step_seconds(step: Callable[[], object], device: torch.device) -> float:
    """What a step takes on a GPU, the fastest of three."""
    return min(wall_s(step, device) for _ in range(3))
