"""The first steps under a plan are watched: what they took stands beside what was predicted, and corrects it.

A prediction can miss what a library allocates for itself. So the allocator's peak is read over two steps, after one
that warms up. If it is above the budget, the plan is made again with as much less; if nothing smaller is possible, that
is said. If the allocator had to give cached memory back in these steps to find room, a share of the budget is left to
it (`outcore.memory.saved_tensors.replan`). Memory of others on the device (a second model, data loaded ahead) is taken
off first: what is allocated when forward begins and is neither the model's own nor the optimizer's, nor what libraries
keep for themselves. Where state lives below the device, what of it is not at home counts.

Watching resets the allocator's peak and waits for the device at the beginning of the first steps; from the fourth on it
is gone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from outcore.machine.units import format_bytes, format_time
from outcore.planner.memory.plan import MemoryPlan

if TYPE_CHECKING:
    from outcore.memory.param_offload.offloader import StateOffloader

_WARM_UPS, _WATCHED = 1, 2


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Memory and time that one step was measured to take."""

    peak_bytes: int | None
    """The most that the model's own tensors took; none where nothing counts them."""
    step_s: float
    """From one forward to the next."""
    retries: int = 0
    """How often the allocator gave cached memory back to find room."""

    def beside(self, plan: MemoryPlan) -> str:
        """The figures beside what was predicted."""
        peak = "" if self.peak_bytes is None else f"peak {format_bytes(self.peak_bytes)}"
        predicted = f" (predicted {format_bytes(plan.peak_bytes)}), " if peak else ""
        return f"measured {peak}{predicted}step {format_time(self.step_s)}"


class MemoryMeter(Protocol):
    """Counts the bytes of tensors on a device."""

    def allocated(self) -> int:
        """Bytes that are allocated now."""

    def peak(self) -> int:
        """The most bytes that were allocated at once since the last `reset`."""

    def reset(self) -> None:
        """Begin to count the peak anew."""

    def retries(self) -> int:
        """How often cached memory was given back to find room, since the process began."""

    def wait(self) -> None:
        """Block until the device has done all it was told."""


class _Allocator:
    """CUDA's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def meter_for(device: torch.device) -> MemoryMeter | None:
    """What counts the memory of a device; None on a CPU, where nothing does."""
    return _Allocator(device) if device.type == "cuda" else None


class PeakMonitor:
    """Looks at the beginning of every forward."""

    def __init__(self, model: nn.Module, state_bytes: int, library_bytes: int, meter: MemoryMeter | None) -> None:
        self.model, self.state_bytes, self.library_bytes = weakref.ref(model), state_bytes, library_bytes
        self.meter = meter
        self.steps = 0
        self.peak = 0
        self.others = 0
        self.retries = 0
        self.fastest_s = float("inf")
        self.began = 0.0

    def look(self, tensors: Iterable[torch.Tensor], keeper: StateOffloader | None = None) -> MeasuredStep | None:
        """Forward begins; what was measured, once the last watched step is over."""
        if self.meter is not None:
            self.meter.wait()
        now = time.perf_counter()
        if self.steps > _WARM_UPS:
            self.fastest_s = min(self.fastest_s, now - self.began)
            if self.meter is not None:
                self.peak = max(self.peak, self.meter.peak() - self.others)
        self.steps += 1
        if self.steps > _WARM_UPS + _WATCHED:
            if self.meter is None:
                return MeasuredStep(None, self.fastest_s)
            return MeasuredStep(self.peak, self.fastest_s, self.meter.retries() - self.retries)
        if self.meter is not None:
            known = self.library_bytes + self.own(keeper) + sum(t.nbytes for t in tensors)
            self.others = max(0, self.meter.allocated() - known)
            self.retries = self.meter.retries() if self.steps == 1 else self.retries
            self.meter.reset()
        self.began = time.perf_counter()
        return None

    def own(self, keeper: StateOffloader | None) -> int:
        """Bytes of weights, gradients and optimizer state that are here."""
        model = self.model()
        assert model is not None
        weights = [*model.parameters(), *model.buffers()]
        mine = [*weights, *(p.grad for p in model.parameters() if p.grad is not None)]
        if keeper is None:
            return self.state_bytes + sum(t.nbytes for t in mine)
        mine += [t for state in keeper.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        mine += [flat_buffer.place.memory for flat_buffer in keeper.flat_buffers if flat_buffer.place is not None]
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine}
        for home in homes_of(keeper):
            found.pop(home.untyped_storage().data_ptr(), None)
        return sum(found.values())


def homes_of(keeper: StateOffloader) -> list[torch.Tensor]:
    """Memory below the device in which state lives."""
    found = [flat_buffer.off_device for flat_buffer in keeper.flat_buffers]
    if keeper.state_copies is not None:
        found += [flat_buffer.off_device for flat_buffer in keeper.state_copies.flat_buffers.values()]
    if keeper.gradients is not None:
        found += [home.memory for home in keeper.gradients.storages.values()]
    return found
