"""What is measured: a classifier on a long sequence, its data, and the clocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import outcore.scan as scan
from outcore.scan import Options

CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """One row: a classifier on the last hidden state, as in the paper."""

    cell: str
    steps: int
    batch: int
    hidden: int
    inputs: int = 1
    every_step: bool = False


class Classifier(nn.Module):
    """A recurrent layer and a linear one on its last output, or on the mean of all."""

    def __init__(self, layer: nn.Module, hidden: int, every_step: bool) -> None:
        super().__init__()
        self.layer, self.head, self.every_step = layer, nn.Linear(hidden, CLASSES), every_step

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        return self.head(output.mean(0) if self.every_step else output[-1])


def make(setting: Setting, options: Options | None, device: str) -> Classifier:
    torch.manual_seed(0)
    kind = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}[setting.cell]
    layer = kind(setting.inputs, setting.hidden)
    if options is not None:
        scan.convert(layer, options=options)
    return Classifier(layer, setting.hidden, setting.every_step).to(device)


def data(setting: Setting, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bit streams whose density tells the class; for more than one input, noise on top of it."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (setting.batch,), generator=generator)
    density = 0.05 + 0.9 * label / (CLASSES - 1)
    x = (torch.rand(setting.steps, setting.batch, setting.inputs, generator=generator) < density[:, None]).float()
    if setting.inputs > 1:
        x += 0.3 * torch.randn(x.shape, generator=generator)
    return x.to(device), label.to(device)


def milliseconds(run: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    """Median over repeats of the time on the device; `before` runs untimed."""
    found = []
    for i in range(repeats + 1):
        given = before() if before else None
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(given) if before else run()  # type: ignore[call-arg]
        end.record()
        torch.cuda.synchronize()
        if i:
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def device_milliseconds(run: Callable[[], Any]) -> float:
    """Time the device was busy, without the gaps in which it waited for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [Setting("RNN", T, 16, 20) for T in (100, 1000, 10000)] + [Setting("GRU", 3000, 16, 20, 20)]
    return [
        *(Setting("RNN", T, 16, 20) for T in (10, 30, 100, 300, 1000, 3000, 10000, 30000)),
        *(Setting("RNN", T, 16, 20, every_step=True) for T in (1000, 30000)),
        *(Setting("GRU", T, N, 20, 20) for T in (300, 3000) for N in (16, 64)),
        Setting("GRU", 30000, 16, 20, 20),
        *(Setting("LSTM", T, 16, 20, 20) for T in (300, 3000, 30000)),
        *(Setting("RNN", 3000, N, 20) for N in (2, 64, 256)),
        *(Setting("RNN", 3000, 16, H) for H in (8, 64, 128, 256, 512)),
        *(Setting("GRU", 3000, 16, H, 20) for H in (64, 128, 256)),
        *(Setting("LSTM", 3000, 16, H, 20) for H in (64, 256)),
    ]
