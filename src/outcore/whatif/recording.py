"""From a job to the recorded step that questions are asked of.

A step is recorded from a profile: what each call takes forward and backward on the device, what the host needs to
launch it, and the optimizer. Nothing is run unless asked (`measured`). Simulated unchanged, the tasks take what
`outcore profile` predicts: the two are the same clocks.

A second recording of the same network (in another precision, another memory format, of another batch, on another GPU)
is *carried*: call by call, what was measured is multiplied by the ratio of two estimates. An estimate may be off by a
third for a certain convolution, and is then off alike in both; what was measured of it stays in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outcore.cost.costs import CallCost, Costs
from outcore.cost.measured.measure import measure
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate, estimate_optimizer
from outcore.cost.predicted.step_memory import memory_curve
from outcore.cost.predicted.step_time import backward_with_sums, measure_optimizer, predict_step
from outcore.cost.profile import Profile
from outcore.cost.training_network import capture_training, with_loss
from outcore.errors import OutcoreError
from outcore.graph import Graph, capture
from outcore.graph.parts import Value
from outcore.job import Job
from outcore.machine import Device
from outcore.machine.clock import TimedRuns
from outcore.whatif.recorded_step import RecordedStep, Task
from outcore.whatif.setup import TrainingSetup

__all__ = ["SetupRecording", "record", "record_setup", "recorded_tasks"]

Progress = Callable[[int, int, str], None]
_NORM_STREAMED = 0.6
"""Share of the memory's rate that batch norms with channels innermost reach."""
_BOUND = 20.0
"""Two estimates of one call may differ by this factor at most; a larger one comes from a call that is nearly free."""


@dataclass(frozen=True)
class SetupRecording:
    """A setup on a device: its profile, and its step as tasks."""

    setup: TrainingSetup
    device: Device
    profile: Profile
    optimizer: TimedRuns | None
    step: RecordedStep

    @property
    def peak_bytes(self) -> int:
        """Most memory at once."""
        return self.profile.memory.peak_bytes

    def carried(self, origin: SetupRecording, measured: SetupRecording) -> SetupRecording:
        """This estimate, corrected by what was measured: `measured` is of the setup that `origin` is the estimate of.

        Calls of the same name take what was measured, times the ratio of this estimate to that of the origin.
        """
        costs = _carried(self.profile.costs, origin.profile.costs, measured.profile.costs)
        optimizer = self.optimizer
        if optimizer is not None and origin.optimizer is not None and measured.optimizer is not None:
            optimizer = _ratio(optimizer, origin.optimizer, measured.optimizer)
        shown = replace(self.profile, costs=costs)
        return replace(
            self, profile=shown, optimizer=optimizer, step=recorded_tasks(shown, optimizer, self.setup.batch)
        )


def record_setup(
    setup: TrainingSetup,
    device: Device,
    *,
    measured: bool = False,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> SetupRecording:
    """Record a setup on a device: by estimate, or by running every call alone where the device is present."""
    graph = captured(setup, device)
    where = "cuda" if device.kind == "cuda" else "cpu"
    if measured:
        costs = measure(graph, where, time_limit_s=time_limit_s, progress=progress)
    else:
        costs = estimate(graph, device)
        if device.kind == "cuda" and setup.channels_last_on(device):
            costs = _with_turned_norms(graph, costs, device)
    timing = _optimizer(setup, graph, costs, device, measured=measured)
    step = predict_step(graph, costs, optimizer=timing)
    memory = memory_curve(graph, costs, optimizer=_state(setup, device))
    found = Profile(setup.job.name, setup.batch, device, graph, costs, step, memory)
    return SetupRecording(setup, device, found, timing, recorded_tasks(found, timing, setup.batch))


def record(job: Job, *, device: Device | None = None, batch: int | None = None, measured: bool = False) -> RecordedStep:
    """The training step of a job as tasks, to be changed and simulated.

    >>> import outcore, torch
    >>> from outcore.machine import parse
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU()),
    ...     batch=lambda size: (torch.randn(size, 3, 512, 512), None),
    ...     size=16,
    ... )
    >>> step = outcore.whatif.record(job, device=parse("h100").devices[0])
    >>> faster = step.scale(step.select(kind="conv"), 0.5)
    >>> faster.simulate().step_s < step.simulate().step_s
    True

    Args:
        job: what is trained.
        device: for which; this machine's if not given.
        batch: size of the batch; the job's own if not given.
        measured: whether every call is run alone on this machine, instead of estimated.
    """
    from outcore.machine import known

    where = device if device is not None else known().devices[0]
    return record_setup(TrainingSetup(job, batch), where, measured=measured).step


def captured(setup: TrainingSetup, device: Device) -> Graph:
    """The graph of a setup's training network, without memory for weights or data if possible.

    Compiled for a GPU, convolutions are channels last: the compiler chooses that by itself.
    """
    job = setup.training_job()
    if setup.autocast is None:
        graph = capture_training(job, setup.size)
    else:
        graph = _under_autocast(job, setup.size)
    return turned(graph) if setup.channels_last_on(device) else graph


def _under_autocast(job: Job, size: int | None) -> Graph:
    """Autocast looks at the device: weights are on the CPU, where those that nobody fills in take no memory."""
    try:
        model = job.build("meta").to_empty(device="cpu").train()
        args, kwargs, target = job.example(size, "meta")
        if job.loss is None or target is None:
            return capture(model, args, kwargs)
        return capture(with_loss(model, job.loss), args, {**kwargs, "target": target})
    except (OutcoreError, NotImplementedError):
        return capture_training(job, size)


def turned(graph: Graph) -> Graph:
    """A graph whose images are channels last inside, as they are on a GPU if weights and inputs are.

    On fake tensors a convolution returns the format that its library on a CPU would choose, so the strides of a
    recording say nothing of a GPU's. What is not dense (a slice of a larger tensor) stays as it is.
    """

    def format_of(value: Value) -> Value:
        dense = math.prod(value.shape) and value.stride == _contiguous(value.shape)
        if len(value.shape) not in (4, 5) or not dense or not getattr(torch, value.dtype).is_floating_point:
            return value
        order = (0, *range(2, len(value.shape)), 1)
        inner = _contiguous(tuple(value.shape[i] for i in order))
        stride = tuple(inner[order.index(i)] for i in range(len(value.shape)))
        return replace(value, stride=stride)

    images = any(graph.blocks[call.block].type.lower().startswith("conv") for call in graph.calls.values())
    return replace(graph, values={n: format_of(v) for n, v in graph.values.items()}) if images else graph


def _with_turned_norms(graph: Graph, costs: Costs, device: Device) -> Costs:
    """Batch norms over images with channels innermost have kernels of their own, which stream.

    A calibration has seen them channel by channel, at a third of that rate.
    """
    rate = _NORM_STREAMED * device.bandwidth_bytes_per_s
    calls = dict(costs.calls)
    for name, cost in costs.calls.items():
        nbytes = sum(graph.values[v].bytes for v in graph.calls[name].outputs)
        if "BatchNorm" not in cost.type or not nbytes:
            continue
        forward, backward = (
            t.scaled(min(1.0, max(passes * nbytes / rate, device.launch_s) / t.median_s)) if t and t.median_s else t
            for t, passes in ((cost.forward, 3), (cost.backward, 5))
        )
        calls[name] = replace(cost, forward=forward, backward=backward)
    return replace(costs, calls=calls)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _state(setup: TrainingSetup, device: Device) -> OptimizerCost:
    """What the optimizer keeps."""
    plain = OptimizerCost.of(setup.job.update, device.kind)
    return fused_cost(plain) if setup.fused_optimizer else plain


def _optimizer(setup: TrainingSetup, graph: Graph, costs: Costs, device: Device, *, measured: bool) -> TimedRuns | None:
    make = setup.training_job().optimizer
    if make is None:
        return None
    if measured:
        where = "cuda" if device.kind == "cuda" else "cpu"
        return measure_optimizer(graph.module.model, make, where, reference=costs.beat_s)
    return estimate_optimizer(costs, device, _state(setup, device))


def fused_cost(plain: OptimizerCost) -> OptimizerCost:
    """One kernel over all parameters: weights, gradients and state are read once, weights and state are written."""
    passes = 3 + 2 * plain.state_per_parameter
    return replace(
        plain,
        workspace_per_parameter=0.0,
        workspace_per_largest=0.0,
        traffic_per_parameter=passes,
        operations=1,
        together=True,
    )


def recorded_tasks(found: Profile, optimizer: TimedRuns | None, batch: int) -> RecordedStep:
    """The tasks of a profile's step: launches of the host and what the device runs, in their order."""
    graph, costs = found.graph, found.costs
    forward = {name: t for name in graph.calls if (t := costs.calls[name].forward) is not None}
    backward = backward_with_sums(graph, costs)
    apart = found.device.kind == "cuda"
    host = "host" if apart else "device"
    tasks: list[Task] = []

    def call(name: str, timing: TimedRuns, phase: str) -> None:
        cost = costs.calls[name]
        flops = cost.flops_forward if phase == "forward" else cost.flops_backward
        launch, run = f"launch {name} {phase}", f"{name} {phase}"
        issue_s = costs.between_s + (timing.dispatch_s if apart else 0.0)
        common = {"block": cost.block, "phase": phase}
        tasks.append(Task(launch, host, issue_s, kind="launch", **common))  # type: ignore[arg-type]
        tasks.append(
            Task(
                run,
                "device",
                timing.median_s,
                after=(launch,),
                kind=cost.type,
                bytes=cost.output_bytes,
                flops=flops,
                low_s=timing.min_s,
                high_s=timing.max_s,
                **common,  # type: ignore[arg-type]
            )
        )

    for name, timing in forward.items():
        call(name, timing, "forward")
    if backward and apart and costs.start_s:
        tasks.append(Task("start backward", host, costs.start_s, kind="launch", phase="backward"))
    for name, timing in backward.items():
        call(name, timing, "backward")
    if optimizer is not None:
        tasks += optimizer_tasks(optimizer, sum(costs.parameters.values()), host)
    return RecordedStep.of(tasks, name=found.job, batch=batch)


def optimizer_tasks(timing: TimedRuns, nbytes: int, host: str) -> list[Task]:
    """An optimizer that steps many parameters: the device begins when the first kernel is launched."""
    common = {"block": "", "phase": "optimizer"}
    rest_s = max(0.0, timing.dispatch_s - timing.lead_s)
    lead = Task("launch optimizer", host, timing.lead_s, kind="launch", **common)  # type: ignore[arg-type]
    run = Task(
        "optimizer", "device", timing.median_s, after=(lead.name,), kind="optimizer", bytes=nbytes,
        low_s=timing.min_s, high_s=timing.max_s, **common,  # type: ignore[arg-type]
    )  # fmt: skip
    more = Task("launch the rest of the optimizer", host, rest_s, kind="launch", **common)  # type: ignore[arg-type]
    return [lead, run, more] if host == "host" else [lead, run]


def _carried(target: Costs, origin: Costs, measured: Costs) -> Costs:
    calls = {}
    for name, cost in target.calls.items():
        before, here = origin.calls.get(name), measured.calls.get(name)
        calls[name] = cost if before is None or here is None else _carried_call(cost, before, here)
    return replace(
        target,
        calls=calls,
        between_s=measured.between_s,
        start_s=measured.start_s,
        beat_s=measured.beat_s,
        sum_dispatch_s=measured.sum_dispatch_s,
        sum_bytes_per_s=_times(measured.sum_bytes_per_s, target.sum_bytes_per_s, origin.sum_bytes_per_s),
    )


def _carried_call(cost: CallCost, before: CallCost, here: CallCost) -> CallCost:
    def carry(target: TimedRuns | None, origin: TimedRuns | None, measured: TimedRuns | None) -> TimedRuns | None:
        if target is None or origin is None or measured is None:
            return target
        return _ratio(target, origin, measured)

    forward = carry(cost.forward, before.forward, here.forward)
    backward = carry(cost.backward, before.backward, here.backward)
    return replace(cost, forward=forward, backward=backward, time_source="scaled")


def _ratio(target: TimedRuns, origin: TimedRuns, measured: TimedRuns) -> TimedRuns:
    """What was measured, times the ratio of two estimates; the target's own spread around it."""
    if not (origin.median_s and target.median_s):
        return replace(target, dispatch_s=_times(measured.dispatch_s, target.dispatch_s, origin.dispatch_s))
    ratio = min(_BOUND, max(1 / _BOUND, target.median_s / origin.median_s))
    time_s = measured.median_s * ratio
    around = time_s / target.median_s
    # A carried time errs less than the estimate that it stands on: what both estimates get wrong alike is divided out.
    low_s, high_s = (time_s + (edge * around - time_s) / 2 for edge in (target.min_s, target.max_s))
    return TimedRuns(
        low_s,
        time_s,
        high_s,
        time_s,
        measured.runs,
        _times(measured.dispatch_s, target.dispatch_s, origin.dispatch_s),
        _times(measured.lead_s, target.lead_s, origin.lead_s),
    )


def _times(measured: float, target: float, origin: float) -> float:
    return measured * min(_BOUND, max(1 / _BOUND, target / origin)) if origin > 0 and target > 0 else measured
