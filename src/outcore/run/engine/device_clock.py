"""Time on the host and on a GPU, on one scale.

Kernels run after the call that starts them has returned, so on a GPU a moment is an event in the stream; it becomes
seconds when the step is over. On one host `time.perf_counter` is the same clock for all processes; between hosts the
difference is estimated once.
"""

from __future__ import annotations

import socket
import time
from typing import Any, TypeAlias

import torch

from outcore.run.ranks.world import World

__all__ = ["DeviceClock", "Moment", "clock_offset"]

Moment: TypeAlias = Any
"""Seconds of `time.perf_counter`, or an event in a stream of a GPU."""


class DeviceClock:
    """Moments of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base: tuple[torch.cuda.Event, float] | None = None

    def start(self) -> float:
        """Begin a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._base = (event, time.perf_counter())
            return self._base[1]
        return time.perf_counter()

    def now(self) -> Moment:
        """This moment of the computation."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """A moment as seconds of the host's clock."""
        if isinstance(moment, float):
            return moment
        assert self._base is not None
        moment.synchronize()
        return self._base[1] + float(self._base[0].elapsed_time(moment)) / 1e3


def clock_offset(world: World) -> float:
    """Seconds to add to this rank's clock to get rank 0's; nothing on the same host."""
    hosts = world.share(socket.gethostname())
    if len(set(hosts)) == 1:
        return 0.0
    found = []
    for _ in range(9):
        world.barrier()
        times = world.numbers([time.perf_counter_ns()])
        found.append((times[0][0] - times[world.rank][0]) / 1e9)
    return sorted(found)[len(found) // 2]
