"""ResNet-50 on one large image: what it costs to save memory when norms may round in another order.

    python benchmarks/within-frontier/norms.py --out results/FILE.json [--side 4096]

Plain PyTorch, then `outcore.within` at shares of its peak, with `exact="bitwise"` and `exact="reassociated"`. A step is
forward, loss and backward; the time is the median of steps timed with CUDA events, the peak the allocator's own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import outcore

WAYS = (("reassociated", None), ("reassociated", 0.33), ("bitwise", 0.33), ("reassociated", 0.5), ("bitwise", 0.5))


def step(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> None:
    """One training step, without the optimizer's."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        loss = model(images).float().square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def timed(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> tuple[float, int]:
    """Milliseconds of a step, and its peak."""
    for _ in range(9):  # the first ones are watched, and may lead to another choice
        step(model, images, bf16=bf16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(model, images, bf16=bf16)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found), torch.cuda.max_memory_allocated()


def kernels(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> list[tuple[str, float, int]]:
    """What the device did longest in a step: kernel, milliseconds, calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, images, bf16=bf16)
        torch.cuda.synchronize()
    rows = [(e.key[:90], e.self_device_time_total / 1e3, e.count) for e in profile.key_averages()]
    return sorted(rows, key=lambda row: -row[1])[:16]


def run(side: int, *, bf16: bool) -> list[dict[str, Any]]:
    """All ways in one precision."""
    torch.manual_seed(0)
    model, images = torchvision.models.resnet50().cuda(), torch.randn(1, 3, side, side, device="cuda")
    if bf16:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    milliseconds, peak = timed(model, images, bf16=bf16)
    rows: list[dict[str, Any]] = [{"precision": "bf16" if bf16 else "tf32", "how": "plain", "ms": milliseconds}]
    rows[0] |= {"peak_bytes": peak, "kernels": kernels(model, images, bf16=bf16)}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        costs = outcore.measure(outcore.capture(model, (images,)), time_limit_s=3)
    for exact, share in WAYS:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            budget = int(share * peak) if share else None
            outcore.within(model, (images,), memory=budget, optimizer=0.0, costs=costs, exact=exact, quiet=True)
        taken, most = timed(model, images, bf16=bf16)
        plan = outcore.memory_plan(model)
        row: dict[str, Any] = {"precision": rows[0]["precision"], "how": exact, "share": share, "ms": taken}
        row |= {"ratio": taken / milliseconds, "peak_bytes": most, "peak_share": most / peak}
        row |= {"predicted_peak_bytes": plan.peak_bytes, "predicted_ms": 1e3 * plan.outcome.time_s}
        if share is None:
            row["kernels"] = kernels(model, images, bf16=bf16)
        rows.append(row)
        print({k: v for k, v in row.items() if k != "kernels"}, flush=True)
    return rows


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", type=int, default=4096)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "side": options.side,
        "rows": [],
    }
    for bf16 in (True, False):
        found["rows"] += run(options.side, bf16=bf16)
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
