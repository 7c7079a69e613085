"""A profile: what a training step of a job takes, and where it goes.

Everything is computed from the graph, its costs and the device: throughput, peak memory against capacity, shares of the
device's peak rates. Memory is all but linear in the batch size, so two sizes give the line and a third checks it; the
largest batch that fits follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outcore.cost.costs import Costs
from outcore.cost.estimate import estimate
from outcore.cost.measure import measure
from outcore.cost.memory import MemoryCurve, memory_curve
from outcore.cost.saved import account
from outcore.cost.step import StepTime, measure_optimizer, predict_step
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Device

__all__ = ["Profile", "largest_batch", "profile"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Profile:
    """One batch size of a job on one device."""

    job: str
    size: int
    device: Device
    graph: Graph
    costs: Costs
    step: StepTime
    memory: MemoryCurve

    @property
    def per_second(self) -> float:
        """Samples per second."""
        return self.size / self.step.step_s

    @property
    def fits(self) -> bool:
        """Whether the step fits in the device's memory."""
        return self.memory.peak_bytes <= self.device.memory_bytes

    @cached_property
    def flops(self) -> int:
        """Matrix work of forward and backward."""
        total = self.costs.total()
        return total.flops_forward + total.flops_backward

    @property
    def busy_share(self) -> float:
        """Share of the step in which the device computes."""
        return (self.step.step_s - self.step.wait_s - self.step.transfer_s) / self.step.step_s

    def peak_share(self, dtype: str) -> float:
        """Achieved share of the device's matrix rate in a precision."""
        return self.flops / self.step.step_s / self.device.rate(dtype)

    def too_large(self) -> list[str]:
        """Calls whose own inputs, outputs and workspace do not fit on the device."""
        found = []
        for name, call in self.graph.calls.items():
            cost = self.costs.calls[name]
            own = sum(self.graph.values[v].bytes for v in dict.fromkeys((*call.inputs, *call.outputs)))
            if own + cost.workspace_forward_bytes > self.device.memory_bytes:
                found.append(name)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "job": self.job,
            "batch": self.size,
            "device": self.device.name,
            "step_s": self.step.step_s,
            "source": self.step.source,
            "per_second": self.per_second,
            "busy_share": self.busy_share,
            "flops": self.flops,
            "peak_bytes": self.memory.peak_bytes,
            "capacity_bytes": self.device.memory_bytes,
            "memory": self.memory.to_json(),
            "too_large": self.too_large(),
            "costs": self.costs.to_json(),
        }


def profile(
    job: Job,
    device: Device,
    *,
    size: int | None = None,
    measured: bool = False,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a job on a device: by estimate, or by measuring every call alone where the device is present."""
    graph = job.capture(size)
    where = "cuda" if device.kind == "cuda" else "cpu"
    if measured:
        costs = measure(graph, where, time_limit_s=time_limit_s, progress=progress)
    else:
        costs = estimate(graph, device)
    make = job.optimizer
    timing = measure_optimizer(graph.module.model, make, where) if measured and make is not None else None
    step = predict_step(graph, costs, optimizer=timing)
    memory = memory_curve(graph, costs, optimizer=make if make is not None else 2.0)
    return Profile(job.name, size or job.size, device, graph, costs, step, memory)


def largest_batch(job: Job, device: Device) -> int:
    """The largest batch whose step fits in the device's memory; 0 if not even one sample does."""
    where = "cuda" if device.kind == "cuda" else "cpu"

    def peak(size: int) -> int:
        graph = job.capture(size)
        optimizer = job.optimizer if job.optimizer is not None else 2.0
        return memory_curve(graph, account(graph, where), optimizer=optimizer).peak_bytes

    one, four = peak(1), peak(4)
    if one > device.memory_bytes:
        return 0
    slope = max(1, (four - one) // 3)
    guess = max(1, 1 + (device.memory_bytes - one) // slope)
    # The line is through small sizes; a point near the answer makes it exact to a sample or so.
    near = peak(guess)
    slope = max(1, (near - one) // max(1, guess - 1))
    return max(1, 1 + (device.memory_bytes - one) // slope)
