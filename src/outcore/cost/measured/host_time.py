"""What the host does between one call and the next.

Isolated calls do not add up to a step: the modules around them, the user's own Python, autograd's bookkeeping for each
parameter, and code that has left the processor's caches by then lie between them. On a GPU that shows where the host is
the slower one, on a CPU in networks of many small calls.

None of it depends on how large the tensors are, so it is measured on a network of tiny layers of every common kind: the
time of its real step, less what its isolated calls take, over the number of calls. Once per device and process.
Backward runs in the calling thread, as it did for the calls: the engine's own thread may be on a core of another speed,
and the difference of two large numbers would be that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outcore.cost.costs import Costs
from outcore.cost.measured.bench import in_this_thread
from outcore.cost.measured.host_speed import reference_work_s
from outcore.graph import Graph, capture
from outcore.machine.clock import synchronize

_WIDTH = 8
_STEPS = 18
_known: dict[tuple[str, int], tuple[float, float]] = {}
"""Seconds per call and direction, and the reference time of the host at which they were measured."""


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(_WIDTH), nn.BatchNorm2d(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.project, self.back = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm1(x)).chunk(3, -1)
        x = x + self.back(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed


class _Small(nn.Module):
    """Tiny layers, twenty modules deep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(_Residual() for _ in range(4)))
        self.second = nn.Sequential(*(_Mixing() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).flatten(2).transpose(1, 2)
        loss: Tensor = self.second(tokens).mean()
        return loss


def between_calls(
    device: torch.device,
    measure: Callable[[Graph], Costs],
    clock: Callable[[], float] = time.perf_counter,
    reference: float = 0.0,
) -> float:
    """Seconds of host time per call and direction that no isolated call shows.

    Args:
        device: where.
        measure: measures every call of a graph in isolation.
        clock: what a step is timed with.
        reference: the reference time of the host for which the answer is wanted; as measured if it is not given.
    """
    key = (str(device), torch.get_num_threads())
    if key not in _known:
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), device:
            model = _Small()
            x = torch.randn(2, _WIDTH, 4, 4, device=device)
        costs = measure(capture(model, (x,)))
        timings = [t for c in costs.calls.values() for t in (c.forward, c.backward) if t is not None]
        alone_s = sum(t.dispatch_s if device.type == "cuda" else t.median_s for t in timings)
        rest_s = _step_s(model, x, clock, costs.beat_s) - alone_s
        _known[key] = max(0.0, rest_s / max(1, len(timings))), costs.beat_s
    seconds, measured_at = _known[key]
    return seconds * reference / measured_at if reference and measured_at else seconds


def remember(device: torch.device, references: float) -> None:
    """Use what another process on the same machine measured, in units of the reference work, instead of measuring it
    here."""
    _known[str(device), torch.get_num_threads()] = references, 1.0


def _step_s(model: nn.Module, x: Tensor, clock: Callable[[], float], reference: float) -> float:
    """The time of a real step; if `reference` is given, as if the host had kept that speed."""
    times = []
    for _ in range(_STEPS):
        model.zero_grad()
        synchronize(x.device)
        before = reference_work_s() if reference else 0.0
        with in_this_thread(x.device):
            start = clock()
            model(x).backward()
            synchronize(x.device)
            took = clock() - start
        times.append(took * 2 * reference / (before + reference_work_s()) if reference else took)
    return statistics.median(times[3:])
