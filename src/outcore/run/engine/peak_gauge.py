"""How much memory a rank holds while a step runs.

On a GPU the allocator knows, at no cost. On the host every tensor has to be watched, which slows a step down, so it is
done only when asked for: then live bytes of tensors are counted, whatever was there before the step included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from outcore.cost.measured.live_bytes import LiveBytes, storage_key
from outcore.program.simulator.memory_curve import RankMemory

__all__ = ["PeakGauge"]


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
