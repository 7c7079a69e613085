"""Adding one gradient to another.

A value that several calls read gets several gradients. No call contains their sum, so its cost is measured on two large
tensors, once per device: the rate of the device, and the host's launch time at its speed then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from outcore.cost.measured.cache_state import CacheState
from outcore.cost.measured.host_speed import reference_work_s
from outcore.machine.clock import clock_for, time_calls

__all__ = ["GradientSumCost"]


@dataclass(frozen=True, slots=True)
class GradientSumCost:
    """The cost of adding one gradient to another."""

    bytes_per_s: float
    """The rate of what is read and written: three times the gradient."""
    dispatch_s: float
    reference_s: float
    """The time of the reference work when it was launched."""

    @staticmethod
    @functools.cache
    def on(device: torch.device) -> GradientSumCost:
        """Measured on a device."""
        count = 2**24 if device.type == "cuda" else 2**20
        a, b = torch.ones(count, device=device), torch.ones(count, device=device)
        between = CacheState(device).before([a])
        before = reference_work_s()
        timing = time_calls(lambda: a.add_(b), device, seconds=0.02, clock=clock_for(device), between=between)
        return GradientSumCost(12.0 * count / timing.median_s, timing.dispatch_s, (before + reference_work_s()) / 2)

    def issued_s(self, reference: float) -> float:
        """The launch time of a sum on a host that takes `reference` for the reference work."""
        return self.dispatch_s * reference / self.reference_s if reference else self.dispatch_s
