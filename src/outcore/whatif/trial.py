"""Real training steps of a setup on this machine: the measured twin of a prediction.

A step is timed from an idle device to an idle device, as `outcore.cost` predicts it. On a GPU the time in which it
computes is taken from torch's profiler in two further steps, so that a prediction can be held against both clocks. On a
CPU with one thread the process's own time is taken, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from outcore.errors import WhatIfError
from outcore.whatif.setup import TrainingSetup

__all__ = ["Trial", "run_setup"]

_WARM_UP = 3
_LEAST, _MOST = 5, 50


@dataclass(frozen=True, slots=True)
class Trial:
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


def run_setup(setup: TrainingSetup, device: str, *, seconds: float = 3.0) -> Trial:
    """Train a few steps of a setup and time them.

    Args:
        setup: what is trained, and how.
        device: "cpu" or "cuda".
        seconds: how long to repeat steps, after the warm-up.

    Raises:
        WhatIfError: the setup cannot be run here; says why.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise WhatIfError("there is no GPU here to verify on")
    if setup.cuda_graph and device != "cuda":
        raise WhatIfError("CUDA graphs need a GPU")
    where = torch.device(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    step = _training_step(setup, where)
    warm = time.monotonic() + min(0.5, seconds)
    done = 0
    while done < _WARM_UP or (time.monotonic() < warm and device == "cpu"):
        step()
        done += 1
    _synchronise(where)
    if setup.cuda_graph:
        step = _graphed(step)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    issued: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < _LEAST or (time.monotonic() < end and len(times) < _MOST):
        _synchronise(where)
        start = clock()
        step()
        issued.append(clock() - start)
        _synchronise(where)
        times.append(clock() - start)
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    busy = _busy_s(step) if device == "cuda" else None
    del step
    gc.collect()
    issue = statistics.median(issued) if device == "cuda" else None
    return Trial(statistics.median(times), min(times), max(times), len(times), device, issue, busy, peak)


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
    if setup.within_bytes is not None:
        from outcore.one_device.within import within

        loss = job.loss
        counted = (lambda output: loss(output, target)) if loss is not None and target is not None else None
        called = within(model, args, kwargs, memory=setup.within_bytes, loss=counted, optimizer=optimizer, quiet=True)
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
    leaves: list[torch.Tensor] = []
    tree_map(lambda t: leaves.append(t) if isinstance(t, torch.Tensor) and t.requires_grad else None, output)
    if not leaves:
        raise WhatIfError("the model returns nothing that has a gradient, so it cannot be trained; give a loss")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


def _graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as one CUDA graph, after a warm-up on a stream of its own as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _busy_s(step: Callable[[], Any], steps: int = 2) -> float | None:
    """Seconds per step in which kernels and copies run, those that overlap counted once."""
    from torch.profiler import ProfilerActivity, profile

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


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
