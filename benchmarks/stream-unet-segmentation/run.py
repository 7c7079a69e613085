"""One training step of a U-Net with a loss over pixels: plain, and streamed in one pass; time and memory.

    python benchmarks/stream-unet-segmentation/run.py --cases 4096:2048,8192:2048 --output results.json

bf16 by autocast, channels_last, batch norms frozen (eval mode, their weights trained), mean cross entropy over all
pixels; the step is forward and backward, gradients of all parameters. Plain has image and mask on the device before
the clock starts; streamed reads both from host memory, as bytes, while it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from outcore.data import ArraySource, Batch
from outcore.models import UNet
from outcore.stream import Streamed, stream
from outcore.stream.plan.plan import StreamPlan


def network(device: str, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return UNet(width=width).eval().to(device).to(memory_format=torch.channels_last)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.float(), target.long())


def measured(step: Any, net: torch.nn.Module, device: str, repeats: int) -> dict[str, Any]:
    """The best of some steps: seconds, peak bytes of the allocator, loss."""
    found = []
    for _ in range(repeats):
        net.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = step()
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        row = {"time_s": time.perf_counter() - start, "loss": float(loss.detach())}
        if device == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            row["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found.append(row)
    norm = torch.stack([p.grad.double().norm() for p in net.parameters() if p.grad is not None]).norm()
    return {**min(found, key=lambda f: f["time_s"]), "first_s": found[0]["time_s"], "gradient_norm": float(norm)}


def pixels(side: int) -> tuple[Batch, torch.Tensor]:
    """An image and its mask, as bytes."""
    generator = torch.Generator().manual_seed(side)
    image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)
    mask = torch.randint(0, 2, (1, side, side), dtype=torch.uint8, generator=generator)
    return Batch((ArraySource(image),)), mask


def plain(net: torch.nn.Module, image: Batch, mask: torch.Tensor, device: str) -> Any:
    """A step on what is there already."""
    whole, target = image.tensor().to(device).to(memory_format=torch.channels_last), mask.to(device)
    return lambda: cross_entropy(net(whole), target)


def one_pass(model: Streamed, image: Batch, mask: torch.Tensor) -> Any:
    """A step that reads what it needs."""
    return lambda: model.loss(image, target=mask, loss=cross_entropy)


def kernels(step: Any, net: torch.nn.Module, device: str) -> str:
    """Where the time of one step goes."""
    measured(step, net, device, 1)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        measured(step, net, device, 1)
    order = f"self_{device}_time_total"
    table: str = profile.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=90)
    return table


def asked(how: str) -> dict[str, Any]:
    """What `stream` is told: a tile, or the memory for which it chooses one."""
    if how.endswith("iB"):
        return {"memory": how}
    sides = tuple(int(n) for n in how.split("x"))
    return {"tile": sides * (2 // len(sides))}


def planned(model: Streamed) -> StreamPlan | None:
    """What was chosen, if that was asked for."""
    return model.plans[-1][1] if model.plans else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--cases", default="4096:2048,8192:2048", help="side:tile, both sides of one: 4096:1024x4096, or 4096:6.5GiB"
    )
    parser.add_argument("--plain-up-to", type=int, default=8192)
    parser.add_argument("--profile", type=Path, help="write a table of kernels for the first case")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    options = parser.parse_args()
    device = options.device
    net = network(device, options.width)
    rows: list[dict[str, Any]] = []
    document = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "width": options.width,
        "rows": rows,
    }

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")

    cases: dict[int, list[dict[str, Any]]] = {}
    for side, how in (case.split(":") for case in options.cases.split(",")):
        cases.setdefault(int(side), []).append(asked(how))
    for side, ways in cases.items():
        image, mask = pixels(side)
        if side <= options.plain_up_to:
            try:
                row = measured(plain(net, image, mask, device), net, device, options.repeats)
                note({"side": side, "how": "plain", **row})
            except torch.cuda.OutOfMemoryError as error:
                note({"side": side, "how": "plain", "failed": str(error).splitlines()[0][:160]})
        for way in ways:
            if device == "cuda":
                torch.cuda.empty_cache()
            model = stream(net, **way, workers=options.workers)
            row = measured(one_pass(model, image, mask), net, device, options.repeats)
            chosen = {"tile": plan.tile, "predicted_bytes": plan.peak_bytes} if (plan := planned(model)) else {}
            note({"side": side, "how": "streamed", **way, **chosen, **row, "waited_s": model.counts.waited_s})
    if options.profile is not None:
        side, (way, *_) = next(iter(cases.items()))
        image, mask = pixels(side)
        steps = {"streamed": one_pass(stream(net, **way, workers=options.workers), image, mask)}
        steps["plain"] = plain(net, image, mask, device)
        options.profile.write_text("\n".join(f"{name}\n{kernels(step, net, device)}" for name, step in steps.items()))


if __name__ == "__main__":
    main()
