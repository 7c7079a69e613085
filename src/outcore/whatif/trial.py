"""Real training steps of a setup on this machine: the measured twin of a prediction.

A step is timed from an idle device to an idle device, as `outcore.cost` predicts it. On a GPU the time in which it
computes is taken from torch's profiler in two further steps, so that a prediction can be held against both clocks. On a
CPU with one thread the process's own time is taken, which other programs on the machine do not lengthen.

A host that others use too may be half as fast again a minute later, by more than most techniques gain. So setups that
are compared are trained in turn, one step of each at a time (`run_in_turn`): what slows one down slows down all.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from outcore.errors import WhatIfError
from outcore.graph.structure import differentiable, sum_loss
from outcore.machine.clock import synchronize
from outcore.whatif.setup import TrainingSetup

__all__ = ["MeasuredSteps", "run_in_turn", "run_setup"]

_WARM_UP = 3
_LEAST, _MOST = 5, 50


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What steps of a setup took."""

    step_s: float
    """Median."""
    fastest_s: float
    slowest_s: float
    steps: int
    device: str
    issue_s: float | None = None
    """How long the host needed to launch it all, at the least; None on a CPU."""
    busy_s: float | None = None
    """How long the device computed in a step; None where that is not known."""
    peak_bytes: int | None = None


def run_setup(setup: TrainingSetup, device: str, *, seconds: float = 3.0) -> MeasuredSteps:
    """Train a few steps of a setup and time them.

    Args:
        setup: what is trained, and how.
        device: "cpu" or "cuda".
        seconds: how long to repeat steps, after the warm-up.

    Raises:
        WhatIfError: the setup cannot be run here; says why.
    """
    return run_in_turn((setup,), device, seconds=seconds)[0]


def run_in_turn(
    setups: Sequence[TrainingSetup],
    device: str,
    *,
    seconds: float = 3.0,
    ready: Callable[[], None] | None = None,
) -> tuple[MeasuredSteps, ...]:
    """Train several setups for some steps each, a step of one after a step of the other, and time them.

    All of them are in memory at the same time.

    Args:
        setups: what is trained, and how.
        device: "cpu" or "cuda".
        seconds: how long to repeat steps of each, after the warm-up.
        ready: called when all of them are compiled and warm, before the first step that is timed; it may wait there
            until nothing else runs on the machine.

    Raises:
        WhatIfError: one of them cannot be run here; says why.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise WhatIfError("there is no GPU here to verify on")
    if any(setup.cuda_graph for setup in setups) and device != "cuda":
        raise WhatIfError("CUDA graphs need a GPU")
    where = torch.device(device)
    warm = [_warm(setup, where, min(0.5, seconds)) for setup in setups]
    if ready is not None:
        ready()
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in warm]
    issued: list[list[float]] = [[] for _ in warm]
    end = time.monotonic() + seconds * len(warm)
    while len(times[0]) < _LEAST or (time.monotonic() < end and len(times[0]) < _MOST):
        for number, (step, _) in enumerate(warm):
            synchronize(where)
            start = clock()
            step()
            issued[number].append(clock() - start)
            synchronize(where)
            times[number].append(clock() - start)
    found = []
    for (step, peak), took, asked in zip(warm, times, issued, strict=True):
        busy = _busy_s(step) if device == "cuda" else None
        issue = statistics.median(asked) if device == "cuda" else None
        # The processor's clock stands still for milliseconds on some machines: then most short steps take no time.
        step_s = statistics.median(took) or statistics.fmean(took)
        found.append(MeasuredSteps(step_s, min(took), max(took), len(took), device, issue, busy, peak))
    del warm, step
    gc.collect()
    return tuple(found)


def _warm(setup: TrainingSetup, where: torch.device, seconds: float) -> tuple[Callable[[], Any], int | None]:
    """A step that has been run some times, and the most memory that it held; of a graph, before it was one."""
    before = torch.cuda.memory_allocated() if where.type == "cuda" else 0
    step = _training_step(setup, where)
    end = time.monotonic() + seconds
    done = 0
    while done < _WARM_UP or (time.monotonic() < end and where.type == "cpu"):
        if done == _WARM_UP - 1 and where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()
        done += 1
    synchronize(where)
    peak = torch.cuda.max_memory_allocated() - before if where.type == "cuda" else None
    return (_graphed(step) if setup.cuda_graph else step), peak


def _training_step(setup: TrainingSetup, device: torch.device) -> Callable[[], Any]:
    """One step of plain training, with the setup's techniques."""
    job = setup.training_job()
    model = job.build(device.type).to(device).train()
    args, kwargs, target = tree_map(
        lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, job.example(setup.size, device.type)
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = job.optimizer(parameters) if job.optimizer is not None and parameters else None
    if optimizer is not None and setup.cuda_graph:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
    called: Callable[..., Any] = model
    if setup.within is not None:
        from outcore.one_device.within import within

        loss = job.loss
        counted = (lambda output: loss(output, target)) if loss is not None and target is not None else None
        called = within(model, args, kwargs, memory=setup.within, loss=counted, optimizer=optimizer, quiet=True)
    if setup.compiled:
        called = torch.compile(model)

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            model.zero_grad()
        output = called(*args, **kwargs)
        loss = job.loss(output, target) if job.loss is not None and target is not None else _summed(output)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _summed(output: Any) -> torch.Tensor:
    if not differentiable(output):
        raise WhatIfError("the model returns nothing that has a gradient, so it cannot be trained; give a loss")
    return sum_loss(output)


def _graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph, after a warm-up on a stream of its own as torch asks for.

    A graph reads the memory of the model and of the batch without holding it, so what is returned holds the step too.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(held: Callable[[], Any] = step) -> None:
        graph.replay()

    return replay


def _busy_s(step: Callable[[], Any], steps: int = 2) -> float | None:
    """Seconds per step in which kernels and copies run, those that overlap counted once."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # one cycle is all that is looked at
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA")
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total * 1e-6 / steps if total else None
