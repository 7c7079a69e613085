"""One exact training step of ResNet-50 on images up to 100,000 x 100,000 px: plain and streamed, time and memory.

    python benchmarks/stream-resnet50-slide/run.py --sides 4096,8192,16384:4096:1 --slides 100000:1:7693 --output o.json

A side may say its tile and how many steps are taken, streamed and plain (``side[:tile[:steps[:plain steps]]]``). bf16
by autocast, channels_last, batch norms frozen (eval mode, their weights trained), one image, a cross entropy on
the class scores; the step is forward and backward, gradients of all parameters. Streamed images are read lazily as
bytes. A slide (``--slides side:tissue:tile[:steps],…``) is written as a pyramidal TIFF, and read from it while the
step runs; of several steps the fastest is noted, and beside it the first, which chooses and compiles kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision

from outcore.data import Batch, Scene, open_slide, write_slide
from outcore.machine.units import parse_bytes
from outcore.stream import Streamed, stream

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Tissue:
    """An image without glass: a random texture that repeats every few thousand pixels, so any region is at hand."""

    dtype = torch.uint8

    def __init__(self, side: int, period: int = 3001) -> None:
        self.shape = (3, side, side)
        self.period = period
        generator = torch.Generator().manual_seed(0)
        self.texture = torch.randint(0, 256, (3, period, period), dtype=torch.uint8, generator=generator)

    def read(self, region: Any) -> torch.Tensor:
        (a, b), (top, bottom), (left, right) = region
        found = torch.empty(b - a, bottom - top, right - left, dtype=torch.uint8)
        p = self.period
        y = top
        while y < bottom:
            height = min(p - y % p, bottom - y)
            x = left
            while x < right:
                width = min(p - x % p, right - x)
                part = self.texture[a:b, y % p : y % p + height, x % p : x % p + width]
                found[:, y - top : y - top + height, x - left : x - left + width] = part
                x += width
            y += height
        return found


def network(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torchvision.models.resnet50(num_classes=2).eval().to(device)
    for name, module in net.named_modules():
        if name.endswith("bn3"):  # without training, residual sums would grow from block to block
            torch.nn.init.constant_(module.weight, 0.25)
    return net.to(memory_format=torch.channels_last)


def batch(source: Any) -> Batch:
    return Batch((source,), mean=MEAN, std=STD)


def step(forward: Any, net: torch.nn.Module, device: str) -> dict[str, float]:
    """One step: seconds, peak bytes of the allocator, loss."""
    net.zero_grad(set_to_none=True)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with torch.autocast(device, dtype=torch.bfloat16):
        scores = forward()
        loss = torch.nn.functional.cross_entropy(scores.float(), torch.ones(1, dtype=torch.long, device=device))
    loss.backward()
    if cuda:
        torch.cuda.synchronize()
    return {
        "time_s": time.perf_counter() - start,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "loss": float(loss.detach()),
    }


def median_step(found: list[dict[str, float]]) -> dict[str, Any]:
    """The median of several steps without the first, the most that any of them took, and all their times."""
    later = sorted(found[1:] or found, key=lambda one: one["time_s"])
    most = {name: max(one[name] for one in found) for name in ("peak_bytes", "reserved_bytes")}
    return {**later[(len(later) - 1) // 2], **most, "steps_s": [one["time_s"] for one in found]}


def plain(net: torch.nn.Module, source: Any, device: str, repeats: int) -> dict[str, Any]:
    image = batch(source)
    try:
        stored = image.read(tuple((0, n) for n in image.shape))
        pixels = image.prepare(stored.to(device)).to(memory_format=torch.channels_last)
        found = [step(lambda: net(pixels), net, device) for _ in range(repeats)]
        return median_step(found)
    except torch.cuda.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0][:160]}


@functools.cache
def ours(net: torch.nn.Module, tile: int, boundary: str | None, workers: int, cache: str) -> Streamed:
    """One model for all images, as in training: images of one size are prepared for once."""
    return stream(net, tile=tile, boundary=boundary, workers=workers, cache=cache)


@contextlib.contextmanager
def held_to(cap: str | None, device: str) -> Iterator[None]:
    """While it lasts, the allocator may reserve no more than this."""
    if device != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    most = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(cap) / most if cap else 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def streamed(
    net: torch.nn.Module,
    source: Any,
    device: str,
    repeats: int,
    tile: int,
    boundary: str | None,
    workers: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    model = ours(net, tile, boundary, workers, options.cache)
    image = batch(source)
    try:
        with held_to(options.cap, device):
            begin = time.perf_counter()
            model.prepare(torch.empty(image.shape, device="meta"))
            prepared = time.perf_counter() - begin
            found = [step(lambda: model(image), net, device) for _ in range(repeats)]
    except torch.cuda.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0][:160]}
    counts = model.counts
    return {
        **median_step(found),
        "first_s": found[0]["time_s"],
        "planning_s": prepared,
        "tile": tile,
        "boundary": boundary,
        "tiles": {"forward": counts.forward, "backward": counts.backward, "reused": counts.reused},
        "waited_s": counts.waited_s,
    }


def kernels(net: torch.nn.Module, source: Any, device: str, model: Streamed) -> str:
    """Where the time of one step goes, on the device."""
    image = batch(source)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step(lambda: model(image), net, device)
    table: str = profile.key_averages().table(
        sort_by=f"self_{device}_time_total", row_limit=40, max_name_column_width=100
    )
    return table


def written(folder: Path, side: int, share: float) -> tuple[Path, float]:
    """A slide as a file, and how long writing it took; one that is there already is used."""
    path, note = folder / f"slide-{side}-{share}.tif", folder / f"slide-{side}-{share}.json"
    if not note.exists():
        start = time.perf_counter()
        write_slide(path, Scene(size=(side, side), share=share))
        note.write_text(json.dumps(time.perf_counter() - start))
    return path, json.loads(note.read_text())


def from_slide(
    net: torch.nn.Module, side: int, share: float, tile: int, repeats: int, options: argparse.Namespace
) -> dict[str, Any]:
    """A step on a slide that is read from its file."""
    path, seconds = written(options.folder, side, share)
    row = {"side": side, "how": "streamed from a TIFF", "tissue": share, "written_s": seconds}
    row |= {"file_bytes": path.stat().st_size}
    how = (repeats, tile, None, 2 * options.workers, options)
    return row | streamed(net, open_slide(path), options.device, *how)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--sides", default="4096,8192", help="side[:tile[:steps[:plain steps]]]; a tile is a quarter, at least 2048"
    )
    parser.add_argument("--boundaries", default="", help="blocks, or empty for as far as it goes")
    parser.add_argument("--plain-up-to", type=int, default=12288)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument(
        "--slides", default="", help="side:tissue:tile[:steps] of slides written and read as TIFFs, e.g. 100000:1:6250"
    )
    parser.add_argument("--slides-first", action="store_true", help="before images that are made up in memory")
    parser.add_argument("--only-write", action="store_true", help="write the slides and stop")
    parser.add_argument("--folder", type=Path, default=Path(), help="for slides")
    parser.add_argument("--cap", help="the most the allocator may reserve while streaming, e.g. 40GiB")
    parser.add_argument(
        "--cache", default="0", help="host memory for pixels that the second pass reads again, e.g. 4GiB"
    )
    parser.add_argument("--profile", type=Path, help="write a table of kernels for the first case")
    parser.add_argument("--search", action="store_true", help="let cuDNN try its algorithms for every shape")
    parser.add_argument("--seconds", type=float, default=600, help="no case is begun after this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    options = parser.parse_args()
    asked = [(*x.split(":"), "1")[:4] for x in options.slides.split(",") if x]
    slides = [(int(side), float(share), int(tile), int(repeats)) for side, share, tile, repeats in asked]
    if options.only_write:
        print([written(options.folder, side, share) for side, share, *_ in slides])
        return
    torch.backends.cudnn.benchmark = options.search
    began = time.perf_counter()
    net = network(options.device)
    rows: list[dict[str, Any]] = []
    document = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cap": options.cap,
        "cache": options.cache,
        "rows": rows,
    }

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")

    def images() -> None:
        for asked in filter(None, options.sides.split(",")):
            side, *given = map(int, asked.split(":"))
            tile, repeats, plainly = (*given, *(max(2048, side // 4), options.repeats, options.repeats)[len(given) :])
            source = Tissue(side)
            if plainly and side <= options.plain_up_to:
                note({"side": side, "how": "plain", **plain(net, source, options.device, plainly)})
            for boundary in options.boundaries.split(","):
                if boundary and side > 8192:  # the map, and what runs untiled after it, grow with the image
                    continue
                if time.perf_counter() - began < options.seconds:
                    how = (repeats, tile, boundary or None, options.workers, options)
                    note({"side": side, "how": "streamed", **streamed(net, source, options.device, *how)})
                if options.profile is not None and not options.profile.exists():
                    model = ours(net, tile, boundary or None, options.workers, options.cache)
                    options.profile.write_text(kernels(net, source, options.device, model))

    def files() -> None:
        for side, share, tile, repeats in slides:
            if time.perf_counter() - began < options.seconds:
                note(from_slide(net, side, share, tile, repeats, options))

    for part in (files, images) if options.slides_first else (images, files):
        part()


if __name__ == "__main__":
    main()
