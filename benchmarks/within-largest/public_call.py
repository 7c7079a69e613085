"""Which of the largest sizes still train by the public call, `outcore.within(model, args, memory="11GiB")`.

    python benchmarks/within-largest/public_call.py --out DIR [--seconds 90] [--device cpu]

The sizes that `run.py` has found, and smaller ones until one trains: three steps of ResNet-50 in TF32 under a limit of
the allocator, each try in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

SIZES = {
    ("batch", "outcore"): (464, 396, 330, 264),
    ("batch", "plain"): (132, 128, 120),
    ("image", "outcore"): (5376, 4864, 4480, 4096, 3584),
    ("image", "plain"): (2560, 2496, 2432),
}
LIMIT = 11 * 2**30


def one(grows: str, how: str, size: int, device: str, pipe: Any) -> None:
    """Train three steps, or say why not."""
    import torch

    import outcore
    from benchmarks.frontier.preload import torchvision

    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        model = torchvision.models.resnet50().to(device)
        shape = (size, 3, 224, 224) if grows == "batch" else (1, 3, size, size)
        images = torch.randn(*shape, device=device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(LIMIT / total)
        begin = time.perf_counter()
        if how == "outcore":
            outcore.within(model, (images,), memory=LIMIT, optimizer=optimizer, loss=_loss, quiet=True)
        planning = time.perf_counter() - begin
        for _ in range(3):
            begin = time.perf_counter()
            optimizer.zero_grad()
            _loss(model(images)).backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
        pipe.send({"size": size, "seconds": seconds, "planning_s": planning, "reserved": reserved})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _loss(output: Any) -> Any:
    return output.float().square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + given.seconds, []
    context = multiprocessing.get_context("spawn")
    for (grows, how), sizes in SIZES.items():
        row: dict[str, Any] = {"model": "resnet50", "limit": "11GiB", "grows": grows, "how": how, "failed": []}
        for size in sizes if given.device == "cuda" else (2 if grows == "batch" else 64,):
            if time.monotonic() > end:
                break
            here, there = context.Pipe()
            process = context.Process(target=one, args=(grows, how, size, given.device, there))
            process.start()
            there.close()
            try:
                found = here.recv() if here.poll(60) else {"error": "took more than a minute"}
            except EOFError:
                found = {"error": "the process ended"}
            process.join(3)
            process.kill()
            if "size" in found:
                row |= found
                break
            row["failed"].append({"size": size, **found})
        rows.append(row)
        print(row, flush=True)
        (given.out / "largest.json").write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
