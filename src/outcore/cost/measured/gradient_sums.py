"""Adding one gradient to another.

A value that several calls read gets several gradients. No call contains their sum, so what it takes is measured on two
large tensors, once per device: the rate of the device, and the host's time to issue it at the pace it had.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from outcore.cost.measured.cache_state import CacheState
from outcore.cost.measured.host_speed import beat_s
from outcore.machine.clock import clock_for, time_calls

__all__ = ["GradientSumCost"]


@dataclass(frozen=True, slots=True)
class GradientSumCost:
    """What it takes to add one gradient to another."""

    bytes_per_s: float
    """Of what is read and written: three times the gradient."""
    dispatch_s: float
    beat_s: float
    """The pace of the host at which it was issued."""

    @staticmethod
    @functools.cache
    def on(device: torch.device) -> GradientSumCost:
        """Measured on a device."""
        count = 2**24 if device.type == "cuda" else 2**20
        a, b = torch.ones(count, device=device), torch.ones(count, device=device)
        between = CacheState(device).before([a])
        before = beat_s()
        timing = time_calls(lambda: a.add_(b), device, seconds=0.02, clock=clock_for(device), between=between)
        return GradientSumCost(12.0 * count / timing.median_s, timing.dispatch_s, (before + beat_s()) / 2)

    def issued_s(self, beat: float) -> float:
        """The host's time to issue a sum at a pace."""
        return self.dispatch_s * beat / self.beat_s if beat else self.dispatch_s
