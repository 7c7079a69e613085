"""Ranks that share one GPU and one image: time and peaks beside the prediction, under CUDA MPS.

    python benchmarks/unet-grid/mps.py --out results.json --limit 330

Starts MPS if it can, then trains a U-Net at 4096 px and a ResNet-50 on one image, on 1, 2 and 4 ranks. Ranks send
through host memory, because gloo cannot send from a GPU. Nothing is begun after the limit; a case that fails, or does
not fit, stays in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.models import UNet
from outcore.run import launch

STEPS = 5


def _images(pixels: int, classes: int | None) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        image = torch.randn(size, 3, pixels, pixels, generator=drawn)
        shape = (size,) if classes is not None else (size, pixels, pixels)
        return image, torch.randint(classes or 2, shape, generator=drawn)

    return batch


def torchvision_model(name: str) -> nn.Module:
    """A network of torchvision without its compiled operators."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.foreign.shim import define_torchvision_operators

    define_torchvision_operators()
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def job(name: str, pixels: int) -> outcore.Job:
    if name == "unet":
        return outcore.Job(
            model=lambda: UNet(3, 2, width=32), batch=_images(pixels, None), loss=F.cross_entropy, size=1
        )
    return outcore.Job(
        model=lambda: torchvision_model("resnet50"), batch=_images(pixels, 1000), loss=F.cross_entropy, size=1
    )


def train(plan: dict[str, Any], name: str, pixels: int) -> dict[str, Any]:
    """On one rank: losses, times of steps, peak of the allocator, and what it waited for."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    chosen = job(name, pixels)
    with outcore.Engine(
        chosen, outcore.Plan.from_json(plan), optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
    ) as engine:
        inputs, targets = chosen.batch(1)
        cuda = engine.device.type == "cuda"
        inputs = inputs.pin_memory() if cuda else inputs
        losses, times = [], []
        for number in range(STEPS):
            if number == 2 and cuda:
                torch.cuda.reset_peak_memory_stats()
            engine.world.barrier()
            begun = time.perf_counter()
            losses.append(engine.step(inputs, targets))
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        timeline = engine.timeline()
        halos = [e for e in timeline.events if e.rank == engine.rank and e.kind == "halo" and e.stream == "receive"]
    later = sorted(times[2:])
    return {
        "losses": losses,
        "step_s": later[len(later) // 2],
        "peak_bytes": peak,
        "receiving_s": sum(e.end_s - e.start_s for e in halos),
        "messages": len(halos),
    }


GRIDS = {"1 rank": (1, 1), "1 x 2": (1, 2), "2 x 2": (2, 2)}


@contextlib.contextmanager
def mps() -> Any:
    """NVIDIA's server that lets processes compute on one GPU at the same time, if it is installed."""
    started = False
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # one that another run has left
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False, timeout=20, capture_output=True)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        started = subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, timeout=20).returncode == 0
    try:
        yield started
    finally:
        if started:
            with contextlib.suppress(subprocess.SubprocessError):  # it waits for processes that are still there
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False, timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "grid-mps.json")
    parser.add_argument("--limit", type=float, default=330.0, help="Seconds after which no case is begun.")
    parser.add_argument("--unet", type=int, default=4096, help="Pixels.")
    parser.add_argument("--resnet", type=int, default=2048, help="Pixels.")
    parser.add_argument("--machine", default="h200")
    given = parser.parse_args()
    began, rows = time.monotonic(), list[dict[str, Any]]()
    with mps() as shared:
        for name, pixels in (("unet", given.unet), ("resnet50", given.resnet)):
            for case, grid in GRIDS.items():
                if time.monotonic() - began > given.limit:
                    rows.append({"network": name, "case": case, "error": "not begun: out of time"})
                    continue
                row: dict[str, Any] = {"network": name, "pixels": pixels, "case": case, "mps": shared}
                try:
                    plan = outcore.spatial.plan_grid(job(name, pixels), grid, machine=given.machine)
                    assert plan.predicted is not None
                    row |= {
                        "predicted_step_s": plan.predicted.time_s,
                        "predicted_peak_bytes": list(plan.predicted.peak_bytes),
                        "why": list(plan.why),
                    }
                    row["ranks"] = launch(train, plan.ranks, plan.to_json(), name, pixels)
                except Exception as error:  # it stays in the table
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
                given.out.write_text(json.dumps(rows, indent=1))
                print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['network']} {row['case']}: {row['error']}"
    first, gib = row["ranks"][0], 2**30
    peaks = ", ".join(f"{rank['peak_bytes'] / gib:.2f}" for rank in row["ranks"])
    expected = max(row["predicted_peak_bytes"]) / gib
    return (
        f"{row['network']} {row['pixels']} px, {row['case']}: step {first['step_s']:.3f} s "
        f"(predicted {row['predicted_step_s']:.3f} on GPUs of their own), peaks {peaks} GiB "
        f"(predicted {expected:.2f}), loss {first['losses'][-1]:.6f}"
    )


if __name__ == "__main__":
    main()
