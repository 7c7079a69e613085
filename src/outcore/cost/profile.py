"""A profile: what a training step of a job takes, and where it goes.

Everything is computed from the graph with its loss, its costs and the device: throughput, peak memory against
capacity, and the compute metrics of the TBD suite (Zhu et al., IISWC 2018): the share of the step in which the device
computes, the share of its matrix rate that is achieved in each precision, and the share of the step in which its
matrix units would be busy at full rate. `scale` predicts a ladder of batch or image sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate, estimate_optimizer
from outcore.cost.predicted.loss_memory import loss_bytes_in, loss_bytes_of, usual_loss_bytes
from outcore.cost.predicted.scaling import Scaling, SizePoint, ladder
from outcore.cost.predicted.step_memory import MemoryCurve, memory_curve
from outcore.cost.predicted.step_time import StepTime, measure_optimizer, predict_step
from outcore.cost.training_network import capture_training, default_loss
from outcore.errors import JobError, OutcoreError
from outcore.graph import Graph
from outcore.graph.structure import leaves
from outcore.job import Job
from outcore.machine import Device

_MATRIX_UNITS = ("tf32", "bf16", "fp16", "fp8")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Precision:
    """The matrix work of a step in one precision."""

    name: str
    flops: int
    time_s: float
    """Of the calls that do it."""
    peak_share: float
    """Of the device's rate in this precision, over the whole step."""
    busy_peak_share: float
    """The same over the time of those calls alone."""


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

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """The matrix work by precision, the most first."""
        sums: dict[str, list[float]] = {}
        for name, cost in self.costs.calls.items():
            if cost.flops_forward and self.graph.calls[name].outputs:
                row = sums.setdefault(self._precision(self.graph.calls[name].outputs[0]), [0, 0.0])
                row[0] += cost.flops_forward + cost.flops_backward
                row[1] += cost.time_s
        found = [
            Precision(
                name,
                int(flops),
                time_s,
                flops / self.step.step_s / self.device.rate(name),
                flops / time_s / self.device.rate(name) if time_s else 0.0,
            )
            for name, (flops, time_s) in sums.items()
        ]
        return tuple(sorted(found, key=lambda p: -p.flops))

    @property
    def matrix_unit_share(self) -> float:
        """Share of the step in which the device's matrix units (tensor cores) would be busy at full rate."""
        return sum(p.peak_share for p in self.precisions if p.name in _MATRIX_UNITS)

    def _precision(self, value: str) -> str:
        dtype = self.graph.values[value].dtype
        if dtype == "float32" and self.device.kind == "cuda" and "tf32" in self.device.rates:
            return "tf32"
        return {"float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32")

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
            "matrix_unit_share": self.matrix_unit_share,
            "precisions": [asdict(p) for p in self.precisions],
            "interval_s": list(self.step.interval_s),
            "memory_by_data_structure": asdict(self.memory.at_peak),
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
    image: int | None = None,
    measured: bool = False,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a job on a device: by estimate, or by measuring every call in isolation where the device is present.

    Args:
        job: what is trained; its loss and optimizer are part of the step where it has them.
        device: its first device here, or another one for an estimate.
        size: of the batch; the job's own by default.
        image: longest side of the images; the job's own by default.
        measured: whether calls are run.
        time_limit_s: for running them.
        progress: called before each call is run.
    """
    graph = capture_training(job, size, image=image)
    if not graph.calls:
        raise JobError(f"the network of {job.name} computes nothing, so there is no step to predict; give it a layer")
    where = "cuda" if device.kind == "cuda" else "cpu"
    make, timing = job.optimizer, None
    if measured:
        costs = measure(graph, where, time_limit_s=time_limit_s, progress=progress)
        timing = measure_optimizer(graph.module.model, make, where) if make is not None else None
    else:
        costs = estimate(graph, device)
        timing = estimate_optimizer(costs, device, make) if make is not None else None
    step = predict_step(graph, costs, optimizer=timing)
    memory = memory_curve(graph, costs, optimizer=job.update)
    return Profile(job.name, size or job.size, device, graph, costs, step, memory)


def loss_bytes_of_job(
    job: Job, graph: Graph, costs: Costs, device: Device, optimizer: OptimizerCost, *, size: int | None = None
) -> int:
    """What the loss of a job holds beside the output, with its targets: its own, or the usual one for its targets.

    Args:
        job: what is trained.
        graph: of its model alone.
        costs: of that.
        device: which it runs on.
        optimizer: of the step.
        size: of the batch; the job's own by default.
    """
    if job.loss is not None:
        with contextlib.suppress(OutcoreError):  # a loss that cannot be recorded
            whole = capture_training(job, size)
            curve = memory_curve(whole, estimate(whole, device), optimizer=optimizer)
            return loss_bytes_in(curve, graph, costs, optimizer)
        return usual_loss_bytes(graph)
    with contextlib.suppress(OutcoreError, NotImplementedError):
        _, _, target = job.example(size, "meta")
        if target is not None:
            taken: int = sum(t.numel() * t.element_size() for _, t in leaves(target, torch.Tensor))
            return taken + loss_bytes_of(graph, lambda output: default_loss(output, target), torch.device("meta"))
    return usual_loss_bytes(graph)


def scale(
    job: Job,
    device: Device,
    *,
    along: Literal["batch", "image"] = "batch",
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    size: int | None = None,
    limit: int = 1 << 16,
) -> Scaling:
    """Time and memory over batch or image sizes, up to the largest that fits; by estimate, so nothing is run.

    Args:
        job: what is trained.
        device: on what.
        along: which size.
        sizes: those that are predicted in any case.
        size: of the batch, for image sizes.
        limit: no larger size is tried.
    """

    def predict(wanted: int) -> SizePoint:
        batch, image = (wanted, None) if along == "batch" else (size, wanted)
        found = profile(job, device, size=batch, image=image)
        return SizePoint(wanted, found.step.step_s, *found.step.interval_s, found.memory.peak_bytes, found.size)

    return ladder(along, sizes, predict, device.memory_bytes, most=limit)


def largest_batch(job: Job, device: Device) -> int:
    """The largest batch whose step fits in the device's memory, to two in a hundred; 0 if not even one sample does."""
    return scale(job, device, sizes=(1, 4)).largest
