"""A slide of 20,000 x 20,000 px trained on a CPU within 2 GiB of process memory, and inferred without seams.

    python benchmarks/stream-cpu-slide/run.py --side 20000 --memory 700MiB --output results/….json

One process: the slide is a pyramidal TIFF, read lazily by two threads; the network is small, with frozen batch norms.
What is measured: seconds of a step, the process's largest resident memory, how long tiles waited for their pixels, the
same step with less and more tissue, and whether the map that `outcore infer` writes equals untiled inference on crops.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import outcore
from outcore.data import Batch, Scene, open_slide, write_slide
from outcore.stream import plan_tiles

JOB = Path(__file__).with_name("job.py")


def classifier() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((3, 8), (8, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)).eval()


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(path: Path, memory: str, workers: int) -> dict[str, Any]:
    """One training step on a slide; run in a process of its own, so that memory is that of the step."""
    before = resident_bytes()
    net = classifier()
    image = Batch((open_slide(path),))
    begin = time.perf_counter()
    plan = plan_tiles(outcore.capture(net, [torch.empty(image.shape, device="meta")]), memory=memory)
    planned = time.perf_counter() - begin
    streamed = plan.apply(net, workers=workers)
    begin, used = time.perf_counter(), time.process_time()
    loss = nn.functional.cross_entropy(streamed(image), torch.ones(1, dtype=torch.long))
    loss.backward()
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    counts = streamed.counts
    return {
        "time_s": seconds,
        "cpu_s": used,
        "planning_s": planned,
        "waited_s": counts.waited_s,
        "resident_bytes": resident_bytes(),
        "resident_before_bytes": before,
        "predicted_bytes": plan.peak_bytes,
        "tile": plan.tile,
        "tiles": {"forward": counts.forward, "backward": counts.backward, "reused": counts.reused},
        "waits": [[round(a - begin, 3), round(b - begin, 3)] for a, b in counts.waits],
        "reads": [[name, round(a - begin, 3), round(b - begin, 3)] for name, a, b in counts.reads],
    }


def alone(path: Path, memory: str, workers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--step", str(path), "--memory", memory, "--workers", str(workers)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def infer(path: Path, folder: Path, memory: str) -> dict[str, Any]:
    """`outcore infer` against the untiled network on crops with a margin."""
    sys.path.insert(0, str(JOB.parent))
    import job

    net = job.model().eval()
    save_file(net.state_dict(), folder / "w.safetensors")
    command = [sys.executable, "-m", "outcore", "infer", str(JOB), "--weights", str(folder / "w.safetensors")]
    command += ["--data", str(path), "-o", str(folder / "mask.tif"), "--memory", memory, "--json"]
    begin = time.perf_counter()
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = time.perf_counter() - begin
    image, mask = open_slide(path), open_slide(folder / "mask.tif")
    side, differing, compared = image.shape[1], 0, 0
    margin, size = 64, 512
    for y, x in np.random.default_rng(0).integers(margin, side - size - margin, (8, 2)) // 8 * 8:
        box = [(0, 3), (y - margin, y + size + margin), (x - margin, x + size + margin)]
        pixels = Batch((image,)).prepare(image.read(box)[None])
        with torch.no_grad():
            expected = net(pixels)[0, :, margin:-margin, margin:-margin].argmax(0)
        got = mask.read([(0, 1), (y, y + size), (x, x + size)])[0]
        differing += int((got != expected).sum())
        compared += size * size
    return {"time_s": seconds, "pixels_compared": compared, "pixels_differing": differing, **shown}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=20000, help="0 for the shares of tissue alone")
    parser.add_argument("--memory", default="700MiB", help="of tensors; the process holds more")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shares", default="0.2")
    parser.add_argument("--share-side", type=int, default=8000)
    parser.add_argument("--step", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    options = parser.parse_args()
    if options.step is not None:
        print(json.dumps(step(options.step, options.memory, options.workers)))
        return
    document: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "side": options.side,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.side:
            slide = write_slide(folder / "slide.tif", Scene(size=(options.side, options.side), share=0.2))
            document["rows"].append({"what": "step", "share": 0.2, **alone(slide, options.memory, options.workers)})
            print({k: v for k, v in document["rows"][-1].items() if k not in ("waits", "reads")}, flush=True)
            options.output.write_text(json.dumps(document) + "\n")
            document["rows"].append({"what": "infer", **infer(slide, folder, options.memory)})
            print(document["rows"][-1], flush=True)
        for share in [float(s) for s in options.shares.split(",") if s]:
            part = write_slide(
                folder / "part.tif", Scene(size=(options.share_side, options.share_side), share=share, tile=128)
            )
            row = alone(part, "100MiB", options.workers)
            del row["waits"], row["reads"]
            document["rows"].append({"what": "share", "side": options.share_side, "share": share, **row})
            print(document["rows"][-1], flush=True)
    options.output.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
