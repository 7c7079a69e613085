"""What `within` costs the host: steps of networks of many small operations, plain and under plans, in one process.

    python benchmarks/within-overhead/run.py [--only NAME …] [--out results/DATE.json]

Tensors are tiny, so a step takes as long as Python and torch's dispatcher take to issue it. Steps of all ways are taken
in turn, and the median of the ratios to the plain step beside each is reported. What is timed is the processor time of
the thread, which others on the machine disturb less than the clock. `watched` is a plan that makes a single value
again: what it costs to see every call. A plan that makes values again has more
calls to issue than plain training: `again` counts them, and `floor` is the share of the step that issuing them takes
anyway (the plain forward's time per call).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import RECOMPUTE

STEPS = 60


class Residual(nn.Module):
    """Convolution, norm and ReLU twice, and a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Attention(nn.Module):
    """A transformer layer written out, as libraries write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm2(x)))))


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Networks that a host feeds with many small operations."""
    torch.manual_seed(0)
    mlp = nn.Sequential(*(m for _ in range(100) for m in (nn.Linear(8, 8), nn.ReLU())))
    return {
        "200 modules in a row": (mlp, torch.randn(4, 8)),
        "residual blocks": (
            nn.Sequential(nn.Conv2d(3, 8, 3), *(Residual(8) for _ in range(16))),
            torch.randn(1, 3, 6, 6),
        ),
        "transformer layers": (nn.Sequential(*(Attention(16, 2) for _ in range(12))), torch.randn(2, 6, 16)),
    }


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of the processor for a forward and a backward."""
    begin = time.thread_time()
    model(x).sum().backward()
    took = time.thread_time() - begin
    model.zero_grad()
    return took


def plans(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], tuple[nn.Module, int]]]:
    """Name of a way -> the model under it, and how many calls it makes again."""
    graph = outcore.capture(model, (x,))
    costs = by_bytes(account(graph), 1e9)
    keeping = StepModel(graph, costs, 0.0, None)
    light = [
        b for b in keeping.buffers.values() if RECOMPUTE in keeping.choices(b) and b.savers and b.workspace_bytes == 0
    ]

    def within(share: float, most: int = 10_000) -> tuple[nn.Module, int]:
        duplicate = copy.deepcopy(model)
        some = [b.name for i, b in enumerate(light) if int(i * share) != int((i - 1) * share)]
        chosen = dict.fromkeys(some[:most], "recompute")
        plan = {**chosen} if share else None
        memory = None if share else "1GiB"
        outcore.within(duplicate, (x,), memory=memory, plan=plan, optimizer=0.0, costs=costs, quiet=True, stream=False)
        return duplicate, sum(len(keeping.buffers[name].writers) for name in chosen if share)

    return {
        "idle": lambda: within(0.0),
        "watched": lambda: within(1.0, 1),
        "third": lambda: within(1 / 3),
        "all": lambda: within(1.0),
    }


def measure(name: str, model: nn.Module, x: torch.Tensor) -> list[dict[str, object]]:
    """All ways of one network, step by step in turn."""
    ways = {"plain": copy.deepcopy(model)}
    again: dict[str, int] = {"plain": 0}
    for way, make in plans(model, x).items():
        try:
            ways[way], again[way] = make()
        except outcore.OutcoreError as refused:
            print(f"{name}: {way}: {refused}")
    for _ in range(10):
        for managed in ways.values():
            step(managed, x)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(STEPS):
        for way, managed in ways.items():
            times[way].append(step(managed, x))
    with torch.no_grad():
        begin = time.thread_time()
        for _ in range(10):
            ways["plain"](x)
        forward_s = (time.thread_time() - begin) / 10
    calls = len(outcore.capture(model, (x,)).calls)
    plain = statistics.median(times["plain"])
    return [
        {
            "network": name,
            "calls": calls,
            "way": way,
            "again": again[way],
            "step_ms": 1e3 * statistics.median(times[way]),
            "ratio": statistics.median(a / b for a, b in zip(times[way], times["plain"], strict=True)),
            "floor": 1 + again[way] * forward_s / calls / plain,
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)

    def wanted(name: str) -> bool:
        return not given.only or any(name.startswith(start) for start in given.only)

    rows = [row for name, (model, x) in networks().items() if wanted(name) for row in measure(name, model, x)]
    print(f"{'network':24s} {'calls':>5s} {'way':>7s} {'again':>5s} {'step':>9s} {'ratio':>6s} {'floor':>6s}")
    for row in rows:
        print("{network:24s} {calls:5d} {way:>7s} {again:5d} {step_ms:6.2f} ms {ratio:6.2f} {floor:6.2f}".format(**row))
    if given.out is not None:
        given.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
