"""What a rank measures in a step: time on the host and on a GPU, on one scale, and memory.

Kernels run after the call that starts them has returned, so on a GPU a moment is an event in the stream; it becomes
seconds when the step is over. On one host `time.perf_counter` is the same clock for all processes; between hosts the
difference is estimated once.

How much memory is held the allocator of a GPU knows, at no cost. On the host every tensor has to be watched, which
slows a step down, so it is done only when asked for: then live bytes of tensors are counted, whatever was there before
the step included.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.graph.aliasing import storage_key
from outcore.program.simulator.memory_curve import RankMemory
from outcore.run.ranks.world import World

Moment: TypeAlias = Any
"""Seconds of `time.perf_counter`, or an event in a stream of a GPU."""


class DeviceClock:
    """Notes moments of a step on the device and on the host, on one scale of seconds."""

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


class PeakGauge:
    """Samples of memory over a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counting = False
        """Whether to count on the host."""
        self.holding: Callable[[], Iterable[torch.Tensor]] = lambda: ()
        """The tensors that are there before a step."""
        self.samples: list[tuple[float, int]] = []
        self.peak_bytes = 0
        self._live: LiveBytes | None = None
        self._base = 0

    def start(self, given: Iterable[torch.Tensor]) -> None:
        """Begin a step; the user's own tensors (`given`) are not counted on the host."""
        self.samples.clear()
        self.peak_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.counting:
            held = {storage_key(t): t for t in self.holding()}
            self._base = sum(t.untyped_storage().nbytes() for t in held.values())
            self._live = LiveBytes((*held.values(), *given))
            self._live.__enter__()  # type: ignore[no-untyped-call]
        self.sample()

    def sample(self) -> None:
        """Note how many bytes are held now."""
        if self.device.type == "cuda":
            self.samples.append((time.perf_counter(), torch.cuda.memory_allocated(self.device)))
        elif self._live is not None:
            self.samples.append((time.perf_counter(), self._base + self._live.live))

    def stop(self) -> None:
        """End a step."""
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        elif self._live is not None:
            live, self._live = self._live, None
            live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.peak_bytes = self._base + live.peak

    def curve(self, start_s: float) -> RankMemory:
        """The samples as a curve from the beginning of the step on."""
        times = tuple(time_s - start_s for time_s, _ in self.samples)
        held = tuple(nbytes for _, nbytes in self.samples)
        at = times[held.index(max(held))] if held else 0.0
        return RankMemory(times, held, self.peak_bytes, at, (0,) * 6)
