"""Tiles on a grid as `outcore.plan` chooses them: predicted time and peak beside the measured ones, on cores.

    python benchmarks/unet-grid/planned_tiles.py --out $OUT

A network that no stages and no grid hold within a budget is planned for two ranks, with calls that were run here in two
processes at once (`measure_s`), and trained by that plan: the median of seven steps, and the largest bytes of living
tensors of a step that is counted. Each rank has a core. A case that is planned otherwise, or fails, stays in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.machine.units import parse_bytes
from outcore.models import UNet
from outcore.run import Engine, launch
from outcore.stream import PixelLoss

STEPS = 7
CASES: dict[str, tuple[int, int, str]] = {
    "U-Net": (256, 8, "12MiB"),
    "U-Net, loss in parts": (512, 8, "8MiB"),
    "pooled": (512, 16, "24MiB"),
}
"""By name: pixels, width, what a rank may hold."""


def _job(name: str) -> outcore.Job:
    pixels, width, _ = CASES[name]

    def model() -> nn.Module:
        torch.manual_seed(0)
        if name == "pooled":
            layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(width, 2))
        return UNet(3, 2, width=width, depth=2)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        target = torch.randint(2, (size,)) if name == "pooled" else torch.randint(2, (size, pixels, pixels))
        return torch.randn(size, 3, pixels, pixels), target

    loss: Any = PixelLoss(F.cross_entropy) if "in parts" in name else F.cross_entropy
    return outcore.Job(model=model, batch=batch, loss=loss, optimizer=_optimizer, name=name)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def rank(name: str) -> dict[str, Any]:
    """Plan and train on one of two ranks, each on a core of its own."""
    number = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number % 2]})
    torch.set_num_threads(1)
    job, (_, _, memory) = _job(name), CASES[name]
    made = outcore.plan(job, devices=2, batch=1, memory=memory, measure_s=6)
    document = made.to_json() if number == 0 else None
    engine = Engine(job, outcore.Plan.from_json(_from_first(document)))
    inputs, target = job.batch(1)
    engine.step(inputs, target)
    took = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step(inputs, target)
        took.append(time.perf_counter() - begun)
    engine.count_memory()
    engine.step(inputs, target)
    peaks = engine.timeline().peak_bytes
    engine.close()
    assert made.predicted is not None
    return {
        "case": name,
        "memory_bytes": parse_bytes(memory),
        "plan": made.arrangement,
        "predicted_s": made.predicted.time_s,
        "measured_s": statistics.median(took),
        "steps_s": took,
        "predicted_bytes": list(made.predicted.peak_bytes),
        "measured_bytes": list(peaks),
    }


def _from_first(document: dict[str, Any] | None) -> dict[str, Any]:
    """The first rank's plan: both measure at the same time, and one decides."""
    from outcore.run.ranks.world import World

    shared = World.join(timeout_s=300.0).share(document)
    found: dict[str, Any] = shared[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rows = []
    for name in CASES:
        if given.only in name:
            try:
                row = launch(rank, 2, name)[0]
                print(
                    f"{name}: {row['plan']}: {row['predicted_s'] * 1e3:.0f} ms predicted, "
                    f"{row['measured_s'] * 1e3:.0f} measured; {max(row['predicted_bytes']) / 2**20:.1f} MiB predicted, "
                    f"{max(row['measured_bytes']) / 2**20:.1f} measured",
                    flush=True,
                )
            except outcore.OutcoreError as error:
                row = {"case": name, "failed": str(error)}
                print(f"{name}: {error}", flush=True)
            rows.append(row)
    where = {"torch": torch.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "planned-tiles.json").write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
