"""A ceiling: the best a device was ever seen to do, and the roofline under it.

Time is never predicted directly. It is predicted as roofline time divided by an efficiency in (0, 1], because
a bounded quantity cannot run away outside the shapes that were measured. For that the roofline must be a
bound in fact and not only on paper: caches beat the memory's bandwidth on small tensors, and clever
algorithms (Winograd) beat the arithmetic rate. So the ceilings are the larger of the device's rates and the
best rates seen among the samples, and the floor is the shortest time seen: below it there is only the start
of the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.cost.measured.samples import Sample
from outcore.cost.predicted.operation import Operation
from outcore.machine.device import Device

UNFITTED_EFFICIENCY = 0.5
"""What is assumed of operations of which nothing was measured: half of the device's rates."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Rates no operation exceeds, and the time none goes below.

    >>> ceiling = Ceiling(flops_per_s=1e12, bytes_per_s=1e11, floor_s=1e-6)
    >>> ceiling.time_s(Operation("copy", batch=1000, in_channels=1000))
    8e-05
    """

    flops_per_s: float
    bytes_per_s: float
    floor_s: float = 0.0
    sms: int = 1

    @classmethod
    def of(cls, device: Device, dtype: str) -> Ceiling:
        """The ceiling that a device's rates alone give."""
        return cls(device.rate(dtype), device.bandwidth_bytes_per_s, device.launch_s, device.sms or 1)

    def raised(self, samples: Sequence[Sample]) -> Ceiling:
        """The ceiling raised to the best that was measured."""
        flops, nbytes, floor = self.flops_per_s, self.bytes_per_s, float("inf")
        for sample in samples:
            time_s = sample.timing.median_s
            flops = max(flops, sample.operation.flops / time_s)
            nbytes = max(nbytes, sample.operation.nbytes / time_s)
            floor = min(floor, time_s)
        return Ceiling(flops, nbytes, floor if samples else self.floor_s, self.sms)

    def time_s(self, operation: Operation) -> float:
        """The roofline: the time below which the operation was never seen."""
        return max(self.work_s(operation), self.floor_s)

    def work_s(self, operation: Operation) -> float:
        """What its FLOPs or its bytes take, without the start of the operation."""
        return max(operation.flops / self.flops_per_s, operation.nbytes / self.bytes_per_s)
