"""Which warps and programs sweeps want: the backward pass in CUDA graphs for several, and the time of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from setting import Setting, data, make, milliseconds
from torch import nn

from outcore.scan import Newton, Options
from outcore.scan.kernels import backward_sizes

KIND = {"RNN": "tanh", "GRU": "gru", "LSTM": "lstm"}
BACKWARD = {
    ("RNN", 1): (1056, 528),
    ("RNN", 2): (792, 528),
    ("RNN", 4): (528, 396),
    ("GRU", 4): (264, 396),
    ("GRU", 2): (264, 396),
    ("LSTM", 4): (264, 396),
    ("LSTM", 2): (264, 396),
}
"""Programs to try by cell and warps."""
FORWARD = {"RNN": ((4, 528), (2, 528)), "GRU": ((4, 264), (2, 264)), "LSTM": ((4, 264), (2, 264))}
"""Warps and programs of the parallel forward pass."""


def sizes(log: Callable[[str], None], save: Callable[[], None], found: dict[str, Any]) -> None:
    """Fill `found`; the best of each cell is left in force for what is measured after it."""
    fastest: dict[str, tuple[float, int, int]] = {}
    for (cell, warps), tries in BACKWARD.items():
        for programs in tries:
            name = f"{cell}, {warps} warps, {programs} programs"
            _use(cell, warps, programs)
            time_ms, kernels = _recorded(cell, None)
            found[name] = {"backward_ms": time_ms, "kernels_us": kernels}
            fastest[cell] = min(fastest.get(cell, (time_ms, warps, programs)), (time_ms, warps, programs))
            log(f"{name}: {found[name]}")
            save()
    for cell, pairs in FORWARD.items():
        _use(cell, *fastest[cell][1:])
        best = None
        for warps, programs in pairs:
            _use_forward(cell, warps, programs)
            time_ms, kernels = _recorded(cell, Newton())
            name = f"{cell} step with parallel forward, {warps} warps, {programs} programs"
            found[name] = {"ms": time_ms, "kernels_us": kernels}
            best = min(best or (time_ms, warps, programs), (time_ms, warps, programs))
            log(f"{name}: {found[name]}")
            save()
        if best is not None:
            _use_forward(cell, *best[1:])


def _use(cell: str, warps: int, programs: int) -> None:
    backward_sizes.WARPS[KIND[cell]], backward_sizes.PROGRAMS[KIND[cell]] = warps, programs


def _use_forward(cell: str, warps: int, programs: int) -> None:
    backward_sizes.FORWARD_WARPS[KIND[cell]], backward_sizes.FORWARD_PROGRAMS[KIND[cell]] = warps, programs


def _recorded(cell: str, newton: Newton | None) -> tuple[float, dict[str, Any]]:
    """Milliseconds of the backward pass, with `newton` of both passes, and microseconds and launches by kernel."""
    setting = Setting(cell, 30000, 16, 20, 1 if cell == "RNN" else 20)
    model = make(setting, Options(backward="scan", forward=newton), "cuda")
    x, label = data(setting, "cuda")
    parameters = list(model.parameters())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = nn.functional.cross_entropy(model(x), label)
        torch.autograd.grad(loss, parameters, retain_graph=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        again = nn.functional.cross_entropy(model(x), label) if newton else loss
        kept = torch.autograd.grad(again, parameters, retain_graph=True)
    time_ms = milliseconds(graph.replay, 18)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    del kept
    kernels: dict[str, list[float]] = {}
    for event in profile.key_averages():
        before = kernels.get(event.key[:44], [0.0, 0])
        kernels[event.key[:44]] = [round(before[0] + event.self_device_time_total, 1), before[1] + event.count]
    return time_ms, {name: value for name, value in kernels.items() if value[0]}
