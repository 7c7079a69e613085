"""Other GPUs: what a job's step takes on each, from what is known of one.

Where the calls were measured on the GPU that is here, those times are carried over (`outcore.whatif.carry_over`);
otherwise the estimate for the GPU whose kernels are known best, the one that a calibration ships for. A GPU with a
calibration of its own is estimated by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outcore.cost.predicted.calibration import Calibration
from outcore.cost.predicted.step_time import predict_step
from outcore.cost.profile import largest_batch
from outcore.errors import MachineError, WhatIfError
from outcore.job import Job
from outcore.machine import Device, parse
from outcore.whatif.carry_over import carry_costs, carry_optimizer
from outcore.whatif.recording import SetupRecording, record_setup, recorded_tasks
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import Technique

__all__ = ["Elsewhere", "OnGpu", "carried_to", "measured_here", "record_on", "try_gpus"]

_KNOWN_BEST = "h200"
_LEAST_S = 2.0
"""Time for measuring the calls of one batch, however many others are measured."""
_SHARES = (0.74, 1.15)
"""Between these, times the predicted step, a step on another GPU lies: eight in ten of the published throughputs of
`benchmarks/whatif-published` do. Networks of their kind are more often faster than predicted than slower."""
_CALIBRATED_SHARES = (0.94, 1.06)
"""The same on a GPU with a calibration of its own."""


def record_on(setup: TrainingSetup, device: Device, *, here: SetupRecording | None = None) -> SetupRecording:
    """The recording of a setup on a device that need not be here.

    Args:
        setup: what is trained, and how.
        device: for which.
        here: the same setup on another GPU, or on this device, measured; else an estimate is carried over.

    Raises:
        WhatIfError: what was measured says nothing of the device.
    """
    if here is not None:
        refuse_other_kind(here.device, device)
        return carried_to(here, device)
    if device.kind == "cpu" or _calibrated(device):
        return record_setup(setup, device)
    return carried_to(record_setup(setup, parse(_KNOWN_BEST).devices[0]), device)


def measured_here(
    here: Device, device: Device, *, time_limit_s: float = 60.0
) -> Callable[[TrainingSetup], SetupRecording]:
    """How setups are recorded by measuring them on the device that is here, each carried over to another.

    The first one is given the time limit, every other one (another batch, a part of it) half of the one before.
    """
    refuse_other_kind(here, device)
    limits_s = (max(_LEAST_S, time_limit_s / 2**n) for n in itertools.count())

    def record(setup: TrainingSetup) -> SetupRecording:
        measured = record_setup(setup, here, measured=True, time_limit_s=next(limits_s))
        return record_on(setup, device, here=measured)

    return record


def refuse_other_kind(here: Device, device: Device) -> None:
    """Refuse to carry what was measured from a CPU to a GPU, or from one CPU to another."""
    if here != device and not here.kind == "cuda" == device.kind:
        raise WhatIfError(
            f"calls that are measured on {here.name} say nothing of {device.name}; leave out --measure to estimate them"
        )


def carried_to(recording: SetupRecording, device: Device) -> SetupRecording:
    """A recording carried over to another GPU, call by call."""
    if recording.device == device:
        return recording
    found = recording.profile
    costs = carry_costs(found.costs, found.graph, recording.device, device)
    timing = recording.optimizer
    optimizer = carry_optimizer(timing, recording.device, device) if timing is not None else None
    step = predict_step(found.graph, costs, optimizer=optimizer)
    shown = replace(found, device=device, costs=costs, step=step)
    tasks = recorded_tasks(shown, optimizer, recording.setup.batch)
    return replace(recording, device=device, profile=shown, optimizer=optimizer, step=tasks)


def _calibrated(device: Device) -> bool:
    for name in (device.name, f"NVIDIA {device.name.split()[0]}"):
        for dtype in ("tf32", "bf16", "fp32"):
            try:
                if Calibration.find(name, dtype) is not None:
                    return True
            except MachineError:  # made by another version
                return True
    return False


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A job's step on one GPU."""

    gpu: str
    batch: int
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    peak_bytes: int
    capacity_bytes: int
    bound_by: str
    largest_batch: int | None = None
    cost_per_epoch: float | None = None
    energy_per_epoch_kwh: float | None = None
    source: str = ""
    """Where the GPU's figures come from."""

    @property
    def fits(self) -> bool:
        """Whether the step fits in its memory."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Elsewhere:
    """A job on several GPUs."""

    job: str
    rows: tuple[OnGpu, ...]
    carried_from: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"job": self.job, "carried_from": self.carried_from, "gpus": [asdict(row) for row in self.rows]}


def try_gpus(
    job: Job,
    devices: Sequence[Device],
    *,
    batch: int | None = None,
    techniques: Sequence[Technique] = (),
    here: SetupRecording | None = None,
    largest: bool = False,
    prices: Sequence[float] = (),
    epoch_samples: int | None = None,
    watts: Sequence[float] = (),
) -> Elsewhere:
    """What a job takes on other GPUs.

    Args:
        job: what is trained.
        devices: which.
        batch: size of the batch; the job's own if not given.
        techniques: applied on each of them.
        here: the job measured on a GPU that is here.
        largest: whether the largest batch that fits is looked for.
        prices: of an hour of each GPU, or one for all; with `epoch_samples` they give the cost of an epoch.
        epoch_samples: in an epoch.
        watts: of each GPU while it trains, or one for all.
    """
    rows = []
    for number, device in enumerate(devices):
        used = [technique.on(device) for technique in techniques]
        setup = TrainingSetup(job, batch)
        for technique in used:
            setup = technique.setup(setup)
        found = record_on(setup, device, here=here if not used else None)
        step = found.step
        for technique in used:
            step = technique.tasks(step, found)
        simulated = step.simulate()
        rate = setup.batch / simulated.step_s
        hours = epoch_samples / rate / 3600 if epoch_samples else None
        price, power = _of(prices, number), _of(watts, number)
        low, high = _CALIBRATED_SHARES if _calibrated(device) else _SHARES
        rows.append(
            OnGpu(
                device.name,
                setup.batch,
                simulated.step_s,
                simulated.step_s * low,
                simulated.step_s * high,
                rate,
                found.peak_bytes,
                device.memory_bytes,
                simulated.bound_by,
                largest_batch(setup.training_job(), device) if largest else None,
                hours * price if hours is not None and price is not None else None,
                hours * power / 1000 if hours is not None and power is not None else None,
                device.source,
            )
        )
    return Elsewhere(job.name, tuple(rows), here.device.name if here is not None else "an estimate")


def _of(values: Sequence[float], number: int) -> float | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else values[number]
