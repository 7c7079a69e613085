"""The largest batch and the largest image that train before memory runs out: plain PyTorch and outcore.within.

    python benchmarks/within-largest/run.py --out results/ [--limits 11GiB,all]

A limit is set on the process (`torch.cuda.set_per_process_memory_fraction`), so that the allocator refuses as a smaller
GPU would. The largest size is predicted: the size at which the memory model's peak meets the limit. That and 1.05 times
that are tried, and smaller ones only if it does not train for two steps. Ours runs by the policies of the smallest peak
found at a moderate size, which go by name and fit every size.

Policies and predictions need no device (`--prepare FILE`) and can be taken from a file (`--prepared FILE`): then the
device does nothing but train.
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import json
import os
import pickle
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.predicted.rough import without_gaps
from outcore.machine import parse
from outcore.machine.units import parse_bytes
from outcore.memory.offload.bandwidth import measured_tier, memory_rate
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.plan import plan_memory
from outcore.planner.memory.search import Assignment, smallest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = {"image": 32, "batch": 4}
"""Sizes are multiples of this."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "unet":
        return outcore.models.UNet().to(DEVICE)
    import torchvision

    return getattr(torchvision.models, name)().to(DEVICE)


def shape(grows: str, size: int) -> tuple[int, int, int, int]:
    return (1, 3, size, size) if grows == "image" else (size, 3, 224, 224)


def amount(grows: str, size: int) -> int:
    """What memory is in proportion to."""
    return size * size if grows == "image" else size


@dataclass
class Basis:
    """A network at a moderate size: what it takes, and how it takes least."""

    name: str
    grows: str
    size: int
    costs: Costs
    keeping: StepModel
    search_s: float
    found: dict[bool, Assignment] = field(default_factory=dict)
    """The smallest peaks, with and without offloading."""
    predicted: dict[tuple[int, str], int] = field(default_factory=dict)
    """Limit and how -> the largest size by the memory model."""

    def least(self, *, offload: bool) -> Assignment:
        """The smallest peak; without offloading where pinning as much host memory as a large GPU has takes minutes."""
        if offload in self.found:
            return self.found[offload]
        keeping = self.keeping
        if not offload:
            keeping = copy.copy(keeping)
            keeping.tier = None
        self.found[offload] = smallest(keeping, time_limit_s=self.search_s)
        return self.found[offload]

    @classmethod
    def measure(cls, name: str, grows: str, size: int, measure_s: float, search_s: float) -> Basis:
        model = build(name)
        images = torch.randn(shape(grows, size), device=DEVICE)
        graph = outcore.capture(model, (images,))
        costs = without_gaps(outcore.measure(graph, time_limit_s=measure_s))
        device = images.device
        keeping = StepModel(graph, costs, 0.0, measured_tier(device), memory_rate(device))
        return cls(name, grows, size, costs, keeping, search_s)

    @classmethod
    def estimate(cls, name: str, grows: str, size: int, search_s: float) -> Basis:
        """Without a device: an H200's, by shapes alone."""
        graph = outcore.capture(build(name), [shape(grows, size)])
        costs = without_gaps(outcore.estimate(graph, parse("h200")))
        tier = OffloadTarget(45e9, 45e9, least_bytes=2**20)
        return cls(name, grows, size, costs, StepModel(graph, costs, 0.0, tier, 3.6e12), search_s)

    def largest(self, limit: int, peak: int) -> int:
        """The size at which a peak, in proportion but for the weights, reaches a limit."""
        first = self.keeping.plain.moments[0].bytes
        fixed = 2 * first.weights + first.state
        share = (limit - fixed) / max(1, peak - fixed)
        scale = share**0.5 if self.grows == "image" else share
        return int(self.size * scale) // STEPS[self.grows] * STEPS[self.grows]

    def peak_at(self, size: int, least: Assignment | None) -> int:
        """The peak of another size, by the memory model."""
        graph = outcore.capture(build(self.name), [shape(self.grows, size)])
        costs = without_gaps(outcore.estimate(graph, parse("h200")))
        if least is None:
            return StepModel(graph, costs, 0.0, None, 3.6e12).plain.peak_bytes
        options: dict[str, Any] = {"tier": OffloadTarget(45e9, 45e9, least_bytes=2**20), "memory_bytes_per_s": 3.6e12}
        policy = dict(least.policy)
        return plan_memory(graph, costs, budget_bytes=None, optimizer=0.0, policy=policy, **options).peak_bytes

    def predict(self, limit: int, how: str, least: Assignment | None) -> int:
        """The largest size whose peak is within a limit."""
        if (limit, how) not in self.predicted:
            size = self.largest(limit, least.outcome.peak_bytes if least else self.keeping.plain.peak_bytes)
            step, power = STEPS[self.grows], 0.5 if self.grows == "image" else 1.0
            for _ in range(2):
                size = int(size * (limit / self.peak_at(size, least)) ** power) // step * step
            self.predicted[limit, how] = size
        return self.predicted[limit, how]


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(model: nn.Module, images: torch.Tensor, steps: int = 2) -> float:
    """Seconds of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(images).square().mean().backward()
        optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - start


def attempt(basis: Basis, size: int, limit: int, least: Assignment | None, args: argparse.Namespace) -> dict[str, Any]:
    """Train at a size."""
    start = time.time()
    clean()
    row: dict[str, Any] = {"size": size}
    try:
        memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
        model = build(basis.name).to(memory_format=memory_format)
        images = torch.randn(shape(basis.grows, size), device=DEVICE).contiguous(memory_format=memory_format)
        if least is not None:
            plan = dict(least.policy)
            options: dict[str, Any] = {"optimizer": 0.0, "costs": basis.costs, "quiet": True, "plan": plan}
            options["exact"] = args.exact
            outcore.within(model, (images,), memory=limit, **options)
            row["predicted_peak"] = outcore.memory_plan(model).peak_bytes
        while args.wait_for is not None and not args.wait_for.exists():  # all is ready; others still measure
            time.sleep(0.02)
        row["seconds"] = train(model, images, args.steps)
        if DEVICE == "cuda":
            row["peak"] = torch.cuda.max_memory_allocated()
            row["reserved"] = torch.cuda.max_memory_reserved()
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:160]}"
    row["wall_s"] = round(time.time() - start, 1)
    return row


def search(
    basis: Basis,
    limit: int,
    least: Assignment | None,
    args: argparse.Namespace,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The largest size that trains, with the sizes that did not."""
    predicted, step = basis.predict(limit, "plain" if least is None else "outcore", least), STEPS[basis.grows]
    failed: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    sizes = [max(step, int(share * predicted) // step * step) for share in args.shares]
    for size in list(dict.fromkeys(sizes))[: args.tries]:
        row = attempt(basis, size, limit, least, args)
        print("  ", json.dumps(row), flush=True)
        if "error" in row:
            failed.append(row)
            continue
        best = max((best, row), key=lambda found: found.get("size", 0))
        report({**best, "predicted": predicted, "failed": failed})
        if not args.on:
            break
    return {**best, "predicted": predicted, "failed": failed}


def allowed(limit: str, total: int) -> int:
    """Bytes of a limit."""
    return int(0.985 * total) if limit == "all" else parse_bytes(limit)


def ways(basis: Basis, limit: str) -> tuple[tuple[str, Assignment | None], ...]:
    return ("plain", None), ("outcore", basis.least(offload=limit != "all"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--networks", default="resnet50")
    parser.add_argument("--limits", default="11GiB,all")
    parser.add_argument("--bases", default="image:4096,batch:32", help="moderate sizes")
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--search-s", type=float, default=4.0)
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--hows", default="plain,outcore")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--shares",
        type=lambda text: [float(share) for share in text.split(",")],
        default=[1.05, 1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.75, 0.7, 0.62, 0.55, 0.4],
        help="of the predicted largest, to try in this order",
    )
    parser.add_argument("--exact", default="bitwise", help="or reassociated: numbers of plain training up to rounding")
    parser.add_argument("--channels-last", action="store_true", help="the order of memory, for plain training and ours")
    parser.add_argument("--on", action="store_true", help="try the other shares too after one that trained")
    parser.add_argument("--wait-for", type=Path, help="a file without which nothing is trained")
    parser.add_argument("--begin-after", type=Path, help="a file without which the device is left alone")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--memory", type=int, default=150109880320, help="bytes of the device, for --prepare")
    parser.add_argument("--name", default="h200")
    parser.add_argument("--prepare", type=Path, help="search for policies without a device, and write them here")
    parser.add_argument("--prepared", type=Path, help="what --prepare has written")
    args = parser.parse_args()
    started = time.time()
    bases: dict[tuple[str, str], Basis] = {}
    if args.prepare is not None:
        for name in args.networks.split(","):
            for base in args.bases.split(","):
                grows, _, size = base.partition(":")
                basis = bases[name, base] = Basis.estimate(name, grows, int(size), args.search_s)
                for offload in (True, False):
                    share = basis.least(offload=offload).outcome.peak_bytes / basis.keeping.plain.peak_bytes
                    print(
                        name,
                        base,
                        "with offload" if offload else "without offload",
                        f"{share:.3f} of plain",
                        flush=True,
                    )
                for limit_name in args.limits.split(","):
                    limit = allowed(limit_name, args.memory)
                    for how, least in ways(basis, limit_name):
                        print(limit_name, how, "predicted", basis.predict(limit, how, least), flush=True)
        args.prepare.write_bytes(gzip.compress(pickle.dumps(bases)))
        return
    if args.prepared is not None:
        bases = pickle.loads(gzip.decompress(args.prepared.read_bytes()))
    while args.begin_after is not None and not args.begin_after.exists():
        time.sleep(0.02)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    total = torch.cuda.get_device_properties(0).total_memory if DEVICE == "cuda" else 16 * 2**30
    rows: list[dict[str, Any]] = []
    environment = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "memory": total,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "outcore": outcore.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
        "order": "channels last" if args.channels_last else "contiguous",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{time.strftime('%Y-%m-%d')}-{args.name}.json"
    for name in args.networks.split(","):
        for base in args.bases.split(","):
            grows, _, size = base.partition(":")
            basis = bases.get((name, base)) or Basis.measure(name, grows, int(size), args.measure_s, args.search_s)
            print(f"{name} {base} ready after {time.time() - started:.0f} s", flush=True)
            for limit_name in args.limits.split(","):
                limit = allowed(limit_name, total)
                clean()
                if DEVICE == "cuda":
                    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
                for how, least in ways(basis, limit_name):
                    if how not in args.hows.split(",") or time.time() - started > args.seconds:
                        continue
                    print(name, limit_name, grows, how, flush=True)
                    grade = {"exact": args.exact} if how == "outcore" else {}
                    row = {"model": name, "limit": limit_name, "grows": grows, "how": how, **grade}

                    def report(found: dict[str, Any], row: dict[str, Any] = row) -> None:
                        document = {"environment": environment, "rows": [*rows, {**row, **found}]}
                        path.write_text(json.dumps(document, indent=1) + "\n")

                    found = search(basis, limit, least, args, report)
                    report(found)
                    rows.append({**row, **found})
                if DEVICE == "cuda":
                    torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
