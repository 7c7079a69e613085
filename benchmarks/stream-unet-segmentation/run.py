"""One training step of a U-Net with a loss over pixels: plain, and streamed in one pass; time and memory.

    python benchmarks/stream-unet-segmentation/run.py --sides 4096,8192 --tiles 1024,2048,4096 --output results.json

bf16 by autocast, channels_last, batch norms frozen (eval mode, their weights trained), one image and its mask in host
memory as bytes, mean cross entropy over all pixels; the step is forward and backward, gradients of all parameters.
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
from outcore.stream import stream


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sides", default="4096,8192")
    parser.add_argument("--tiles", default="1024,2048,4096")
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

    for side in map(int, options.sides.split(",")):
        generator = torch.Generator().manual_seed(side)
        pixels = torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)
        mask = torch.randint(0, 2, (1, side, side), dtype=torch.uint8, generator=generator)
        image = Batch((ArraySource(pixels),))
        try:

            def plain(image: Batch = image, mask: torch.Tensor = mask) -> torch.Tensor:
                whole = image.prepare(image.read([(0, n) for n in image.shape]).to(device))
                return cross_entropy(net(whole.to(memory_format=torch.channels_last)), mask.to(device))

            note({"side": side, "how": "plain", **measured(plain, net, device, options.repeats)})
        except torch.cuda.OutOfMemoryError as error:
            note({"side": side, "how": "plain", "failed": str(error).splitlines()[0][:160]})
        for tile in (t for t in map(int, options.tiles.split(",")) if t < side):
            if device == "cuda":
                torch.cuda.empty_cache()
            model = stream(net, tile=tile, workers=options.workers)

            def one_pass(model: Any = model, image: Batch = image, mask: torch.Tensor = mask) -> torch.Tensor:
                made: torch.Tensor = model.loss(image, target=mask, loss=cross_entropy)
                return made

            row = measured(one_pass, net, device, options.repeats)
            note({"side": side, "how": "streamed", "tile": tile, **row, "waited_s": model.counts.waited_s})


if __name__ == "__main__":
    main()
