"""Before the first step: what will be trained, what it will cost, and what was decided, as one small table.

The network is recorded for the size of the data at hand without memory for either, its costs are estimated for the
device, and the table says what a plain step would need beside what was planned. Nothing is asked.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate, estimate_optimizer
from outcore.cost.predicted.loss_memory import apart, loss_bytes_in
from outcore.cost.predicted.step_memory import memory_curve
from outcore.cost.predicted.step_time import predict_step
from outcore.cost.training_network import with_loss
from outcore.data import Batch
from outcore.errors import OutcoreError
from outcore.graph import Graph, capture
from outcore.graph.structure import leaves, substitute
from outcore.job import Job
from outcore.machine import Device, format_bytes, format_time, rated, remembered
from outcore.machine.units import counted
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.run.engine.batch import arguments
from outcore.run.engine.setup import choose_device
from outcore.run.ranks.world import identify
from outcore.train.progress import count_rate
from outcore.train.settings.config import Config, computing
from outcore.train.settings.schedules import make_optimizer

__all__ = ["RunForecast", "device_here", "duration", "forecast", "start_table"]


_SHAPED = (torch.Tensor, Batch)


@dataclass(frozen=True)
class RunForecast:
    """What is predicted for a run; figures that could not be predicted are None."""

    graph: Graph | None
    device: str
    shapes: tuple[tuple[int, ...], ...]
    parameters: int = 0
    step_s: float | None = None
    """Of one micro-batch, without a budget; where images differ in size, of the largest."""
    peak_bytes: int | None = None
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = ()
    planned_step_s: float | None = None
    planned_peak_bytes: int | None = None
    decisions: tuple[tuple[str, str], ...] = ()
    curve: tuple[int, ...] = ()
    """Memory of a plain step from call to call."""
    loss_bytes: int | None = None
    """What the loss holds beside the output, with its targets, where that is the memory of the step with its loss."""
    beside: LossAndUpdate | None = None
    """Seconds of the loss and the optimizer's step, for plans of several ranks."""
    mean_size: float = 1.0
    """Pixels of a mean image, as a share of the largest, for which the step is predicted."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the graph; seconds are those of an image of mean size, which is what is measured."""
        seconds = {
            name: None if value is None else value * self.mean_size
            for name, value in (("step_s", self.step_s), ("planned_step_s", self.planned_step_s))
        }
        return {
            "device": self.device,
            "shapes": [list(s) for s in self.shapes],
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            **seconds,
            "planned_peak_bytes": self.planned_peak_bytes,
            "notes": list(self.notes),
            "decisions": [list(d) for d in self.decisions],
        }


def device_here(name: str | None) -> tuple[str, Device]:
    """The device to train on: what was asked for, else a GPU if there is one."""
    kind = choose_device(name).type
    machine = remembered()
    devices = [device for device in (*machine.devices, machine.host) if device is not None]
    return name or kind, rated(next((d for d in devices if d.kind == kind), devices[0]))


def forecast(job: Job, inputs: Any, config: Config, targets: Any = None) -> RunForecast:
    """Estimate a plain step for inputs of a given size: tensors, lazy batches, a tuple of them, or a dictionary.

    With targets the memory is that of the step with the job's own loss, as `outcore profile` shows it.
    """
    _, device = device_here(config.train.device)
    given = arguments(inputs)
    shapes = tuple(tuple(x.shape) for _, x in leaves(given, _SHAPED))
    try:
        graph = _record(job, given, config.train.precision)
        parameters = graph.root.parameters
        costs = estimate(graph, device)
        trained = make_optimizer(config.optimizer, job)
        timed = bool(job.optimizer or config.optimizer.name)
        timing = estimate_optimizer(costs, device, trained) if timed else None
        step = predict_step(graph, costs, optimizer=timing)
        curve = memory_curve(graph, costs, optimizer=trained)
        held: int | None = None
        whole: Graph | None = None
        with_it: Costs | None = None
        if job.loss is not None and targets is not None:
            with contextlib.suppress(OutcoreError):  # a loss that cannot be recorded is not counted
                whole = _record(job, given, config.train.precision, targets)
                divided = identify(os.environ) is not None  # several ranks may each take a part of the batch
                with_it = batch_costs(whole, device) if divided else estimate(whole, device)
                step = predict_step(whole, with_it, optimizer=timing)
                curve = memory_curve(whole, with_it, optimizer=trained)
                held = loss_bytes_in(curve, graph, costs, OptimizerCost.of(trained, device.kind))
    except OutcoreError as error:
        said = f"nothing is predicted: {str(error).splitlines()[0]}"
        return RunForecast(None, device.name, shapes, _parameters(job), notes=(said,))
    beside = LossAndUpdate.between(graph, costs, device, whole, with_it, trained)
    notes = (f"{len(step.unmeasured)} calls of unknown time are not in it",) if step.unmeasured else ()
    return RunForecast(
        graph,
        device.name,
        shapes,
        parameters,
        step.step_s,
        curve.peak_bytes,
        device.memory_bytes,
        notes,
        curve=tuple(moment.bytes.total for moment in curve.moments),
        loss_bytes=held,
        beside=beside if timed else replace(beside, update_s=0.0),
    )


def _record(job: Job, given: tuple[tuple[Any, ...], dict[str, Any]], precision: str, targets: Any = None) -> Graph:
    """The graph for inputs of these shapes, with the loss if there are targets; nothing of this size is allocated."""

    def stand_in(x: Any) -> torch.Tensor:
        return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")

    args, kwargs = substitute(given, _SHAPED, stand_in)
    model = job.build("meta").train()
    if precision != "fp32":  # autocast looks at the device; weights that nobody fills in take no memory
        model = model.to_empty(device="cpu")
    with computing(precision, "cpu"):
        if job.loss is None or targets is None:
            return capture(model, args, kwargs)
        target = substitute(targets, torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        return capture(with_loss(model, apart(job.loss)), args, {**kwargs, "target": target})


def _parameters(job: Job) -> int:
    with torch.random.fork_rng(devices=[]), contextlib.suppress(OutcoreError, NotImplementedError):
        return sum(p.numel() for p in job.build("meta").parameters())
    return 0


def start_table(config: Config, job: Job, found: RunForecast, *, steps: int, examples: int, batch: int) -> Table:
    """What was decided and what it will cost.

    Args:
        config: the settings.
        job: what is trained.
        found: the forecast.
        steps: of an epoch.
        examples: of an epoch.
        batch: examples of a batch.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    shapes = ", ".join("x".join(map(str, shape)) for shape in found.shapes)
    table.add_row("train", f"{job.name} on {found.device}")
    largest = "up to " if found.mean_size < 1 else ""
    table.add_row("network", f"{found.parameters:,} parameters, input {largest}{shapes}, {config.train.precision}")
    batches = f"batch {batch}" + (f" x {config.train.accumulate}" if config.train.accumulate > 1 else "")
    length = f"{counted(steps, 'step')} an epoch, {counted(config.train.epochs, 'epoch')}"
    table.add_row("data", f"{counted(examples, 'example')}, {length}, {batches}")
    if found.peak_bytes is not None and found.capacity_bytes is not None:
        table.add_row(
            "plain step", f"{duration(found.step_s)}, {format_bytes(found.peak_bytes)} at its peak (estimated)"
        )
    for name, text in found.decisions:
        table.add_row(name, text)
    step_s = found.planned_step_s or found.step_s
    if step_s is not None:
        whole = step_s * found.mean_size * config.train.accumulate * steps
        rate = examples / whole if whole else 0.0
        table.add_row("expected", f"{duration(whole)} an epoch, {count_rate(rate)} examples/s")
    for note in found.notes:
        table.add_row("note", note)
    table.add_row("run", f"{config.out} (settings, figures, checkpoints, report)")
    return table


def duration(seconds: float | None) -> str:
    """A time in words: seconds, then minutes, then hours."""
    if seconds is None:
        return "?"
    if seconds < 120:
        return format_time(seconds)
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
