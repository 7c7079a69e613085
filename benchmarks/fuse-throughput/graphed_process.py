"""A training step of one model as strong as a process of its own can make it: a peer for processes that share a GPU.

cuDNN's search is on, images have their channels where that is faster (both are timed), and the whole step, optimizer
included, is one CUDA graph. On a CPU, for trials, it is the step without a graph.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["graphed_step"]

Step = Callable[[], None]
_WARM, _TIMED = 4, 20


def graphed_step(device: torch.device, workload: Any, amp: bool) -> Step:
    """The faster of both layouts."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 4
    layouts = (False, True) if workload.images else (False,)
    steps = [_step(device, workload, amp, last) for last in layouts]
    times = [_seconds(step, device) for step in steps]
    return steps[times.index(min(times))]


def _step(device: torch.device, workload: Any, amp: bool, channels_last: bool) -> Step:
    model = workload.build(0).to(device)
    torch.manual_seed(0)
    batch = tuple(t.to(device) for t in workload.batch())
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        batch = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in batch)
    adam = functools.partial(torch.optim.Adam, lr=1e-4, capturable=device.type == "cuda")
    if workload.adversarial:
        objectives = workload.objectives(lambda params, i=0: adam(params)).values()
        pairs = [(o.loss, o.optimizer(model, 0)) for o in objectives]
    else:
        pairs = [(lambda m, x, y: F.cross_entropy(m(x), y), adam(model.parameters()))]

    def eager() -> None:
        for loss, optimizer in pairs:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                found = loss(model, *batch)
            found.backward()
            optimizer.step()

    if device.type != "cuda":
        return eager
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            eager()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()
    return graph.replay


def _seconds(step: Step, device: torch.device) -> float:
    count = _TIMED if device.type == "cuda" else 1
    for timed in (False, True):
        begin = time.perf_counter()
        for _ in range(count if timed else 1):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - begin
