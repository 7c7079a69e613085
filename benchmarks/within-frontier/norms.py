"""ResNet-50 on one large image: what it costs to save memory when norms may round in another order.

    python benchmarks/within-frontier/norms.py --out results/FILE.json [--side 4096] [--precisions bf16] [--ways ...]

Plain PyTorch, then `outcore.within` at shares of its peak, with `exact="bitwise"` and `exact="reassociated"`. A step is
forward, loss and backward; the time is the median of steps timed with CUDA events, the peak the allocator's own. "Host"
is how long the host takes to issue a step: where it is as long as the step itself, the device waits for the host.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import outcore

WAYS = "reassociated,reassociated:0.33,bitwise:0.33,reassociated:0.5,bitwise:0.5"


def step(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> None:
    """One training step, without the optimizer's."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        loss = model(images).float().square().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def timed(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> tuple[float, float, int]:
    """Milliseconds of a step and of the host that issues it, and its peak."""
    for _ in range(9):  # the first ones are watched, and may lead to another choice
        step(model, images, bf16=bf16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found, host = [], []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        began = time.perf_counter()
        step(model, images, bf16=bf16)
        host.append(1e3 * (time.perf_counter() - began))
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found), statistics.median(host), torch.cuda.max_memory_allocated()


def gradient(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Of all parameters, as one vector."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        loss = model(images).float().square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in found]).cpu().double()


def run(side: int, ways: list[str], *, bf16: bool) -> Iterator[dict[str, Any]]:
    """All ways in one precision."""
    torch.manual_seed(0)
    model, images = torchvision.models.resnet50().cuda(), torch.randn(1, 3, side, side, device="cuda")
    if bf16:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    precision = "bf16" if bf16 else "tf32"
    milliseconds, host, peak = timed(model, images, bf16=bf16)
    want, again = (gradient(model, images, bf16=bf16) for _ in range(2))
    row: dict[str, Any] = {"precision": precision, "how": "plain", "ms": milliseconds, "host_ms": host}
    yield row | {"peak_bytes": peak, "again": compared(want, again)}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        costs = outcore.measure(outcore.capture(model, (images,)), time_limit_s=2)
    for way in ways:
        exact, _, given = way.partition(":")
        share = float(given) if given else None
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            budget = int(share * peak) if share else None
            outcore.within(model, (images,), memory=budget, optimizer=0.0, costs=costs, exact=exact, quiet=True)
        taken, host, most = timed(model, images, bf16=bf16)
        plan, (entry,) = outcore.memory_plan(model), model.__dict__["forward"].admitted.values()
        row = {"precision": precision, "how": exact, "share": share, "ms": taken, "host_ms": host}
        row |= {"ratio": taken / milliseconds, "peak_bytes": most, "peak_share": most / peak}
        row |= {"predicted_peak_bytes": plan.peak_bytes, "predicted_ms": 1e3 * plan.outcome.time_s}
        contests = list(model.__dict__["forward"].ab_test.times.values())
        row |= {"replaced_calls": len(entry.compiled.instead), "fused_and_library_s": contests}
        yield row | {"gradient": compared(want, gradient(model, images, bf16=bf16))}


def compared(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Length of the difference over the length, and cosine."""
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
    return {"off": float((a - b).norm() / a.norm()), "cosine": float(cosine)}


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--ways", default=WAYS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "side": options.side,
        "rows": [],
    }
    for precision in options.precisions.split(","):
        for row in run(options.side, options.ways.split(","), bf16=precision == "bf16"):
            print(row, flush=True)
            found["rows"].append(row)
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
