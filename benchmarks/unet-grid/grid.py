"""A U-Net on one image, on one rank and over grids of ranks: losses, peak of every rank, time of a step.

    python benchmarks/unet-grid/grid.py --pixels 2048 --out results.json

All ranks are processes of this machine; on one GPU they share it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import outcore
from outcore.models import UNet
from outcore.run import launch


def job(pixels: int, width: int, double: bool) -> outcore.Job:
    dtype = torch.float64 if double else torch.float32

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.Generator().manual_seed(3)
        image = torch.randn(size, 3, pixels, pixels, generator=noise, dtype=dtype)
        return image, torch.randint(2, (size, pixels, pixels), generator=noise)

    return outcore.Job(model=lambda: UNet(3, 2, width=width).to(dtype), batch=batch, loss=F.cross_entropy, size=1)


def train(plan: dict[str, Any], pixels: int, width: int, double: bool, steps: int) -> dict[str, Any]:
    """On one rank: losses, median time of a step, peak of the device's memory, messages of the last step."""
    made = outcore.Plan.from_json(plan)
    chosen = job(pixels, width, double)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with outcore.Engine(chosen, made, optimizer=lambda params: torch.optim.SGD(params, lr=0.05)) as engine:
        inputs, targets = chosen.batch(1)
        cuda = engine.device.type == "cuda"
        inputs = inputs.pin_memory() if cuda else inputs
        losses, times = [], []
        for number in range(steps):
            if number == 1 and cuda:
                torch.cuda.reset_peak_memory_stats()
            engine.world.barrier()
            begun = time.perf_counter()
            losses.append(engine.step(inputs, targets))
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        events = [e for e in engine.timeline().events if e.rank == engine.rank]
        waits = sum(e.end_s - e.start_s for e in events if e.kind == "halo" and e.stream == "receive")
    later = sorted(times[1:])
    return {"losses": losses, "step_s": later[len(later) // 2], "peak_bytes": peak, "receiving_s": waits}


def one(
    pixels: int, width: int, double: bool, grid: tuple[int, ...], steps: int, machine: str | None
) -> dict[str, Any]:
    chosen = job(pixels, width, double)
    plan = outcore.spatial.plan_grid(chosen, grid, machine=machine)
    assert plan.predicted is not None
    ranks = launch(train, plan.ranks, plan.to_json(), pixels, width, double, steps)
    return {
        "grid": list(grid),
        "pixels": pixels,
        "width": width,
        "dtype": "float64" if double else "float32",
        "predicted_peak_bytes": list(plan.predicted.peak_bytes),
        "predicted_step_s": plan.predicted.time_s,
        "why": list(plan.why),
        "ranks": ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=int, default=2048)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--machine", default=None)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    given = parser.parse_args()
    rows = []
    small = [(96, 4, True, grid, 3) for grid in ((1, 1), (2, 2))]
    large = [(given.pixels, given.width, False, grid, given.steps) for grid in ((1, 1), (1, 2), (2, 2))]
    for case in (*small, *large):
        try:
            row = one(*case, given.machine)
        except Exception as error:  # a case that fails stays in the table
            row = {"grid": list(case[3]), "pixels": case[0], "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        given.out.write_text(json.dumps(rows, indent=1))
        if "error" in row:
            print(row)
            continue
        first = row["ranks"][0]
        peaks = [rank["peak_bytes"] / 2**30 for rank in row["ranks"]]
        said = ", ".join(f"{p:.2f}" for p in peaks)
        print(row["grid"], row["pixels"], row["dtype"], f"step {first['step_s']:.3f} s, peaks {said} GiB", end=" ")
        print(f"predicted {max(row['predicted_peak_bytes']) / 2**30:.2f} GiB", f"loss {first['losses'][-1]:.12f}")


if __name__ == "__main__":
    main()
