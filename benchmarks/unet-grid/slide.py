"""A slide of 32,768 x 32,768 pixels on four ranks, each of which streams its part in tiles, beside one rank.

    python benchmarks/unet-grid/slide.py --out $OUT                        # one GPU, four ranks under CUDA MPS
    python benchmarks/unet-grid/slide.py --size 1024 --device cpu --tile 256 --most 1000    # the same, small

The slide is made up where it is read: bytes of a pattern, shifted from block to block, so that no two blocks are equal;
no rank holds more of it than a tile. Batch norms have fixed statistics, as is usual where slides are streamed. A narrow
U-Net, whose target is as large as the slide and is read in tiles as well (each rank takes its term of the loss), and a
ResNet-18 with one label, in float32; before them the U-Net in float64 on an eighth of the side. Every network is
trained from the same weights on one rank and on a grid of 2 x 2. Compared are losses, and the gradients of every
parameter in every step by the largest difference over the largest gradient of the network.

A case that fails, or is not begun in time, stays in the table.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.models import UNet
from outcore.run import Engine, launch

sys.path.insert(0, str(Path(__file__).parent))
from mps import mps, torchvision_model

_SIDE = 2048
"""Pixels of a block of the pattern."""


@dataclass(frozen=True)
class Slide:
    """Bytes that are made when they are read."""

    size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        drawn = torch.Generator().manual_seed(5)
        coarse = torch.rand(1, 3, _SIDE // 16, _SIDE // 16, generator=drawn)
        pattern = F.interpolate(coarse, (_SIDE, _SIDE), mode="bilinear") * 200
        pattern += torch.randint(0, 56, (1, 3, _SIDE, _SIDE), generator=drawn)
        object.__setattr__(self, "_pattern", pattern.to(torch.uint8))

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 3, self.size, self.size)

    def read(self, region: Any) -> torch.Tensor:
        """A region, block by block."""
        _, (a, b), (top, bottom), (left, right) = region
        found = torch.empty(1, b - a, bottom - top, right - left, dtype=torch.uint8)
        for i in range(top // _SIDE, (bottom - 1) // _SIDE + 1):
            for j in range(left // _SIDE, (right - 1) // _SIDE + 1):
                y0, y1 = max(top, i * _SIDE), min(bottom, (i + 1) * _SIDE)
                x0, x1 = max(left, j * _SIDE), min(right, (j + 1) * _SIDE)
                block = self._pattern[:, a:b, y0 - i * _SIDE : y1 - i * _SIDE, x0 - j * _SIDE : x1 - j * _SIDE]
                found[:, :, y0 - top : y1 - top, x0 - left : x1 - left] = block + (37 * i + 91 * j) % 256
        return found

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        """Bytes as the network sees them."""
        return crop.to(self.dtype) / 255 - 0.5


@dataclass(frozen=True)
class Labels:
    """Two classes: bright and dark pixels of the slide."""

    slide: Slide
    dtype: torch.dtype = torch.int64

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.slide.size, self.slide.size)

    def read(self, region: Any) -> torch.Tensor:
        samples, rows, columns = region
        return (self.slide.read((samples, (0, 1), rows, columns))[:, 0] > 127).to(torch.uint8)

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        return crop.to(torch.int64)


def _fixed(model: nn.Module) -> nn.Module:
    """With batch norms whose statistics do not change, somewhat away from the identity."""
    drawn = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.running_mean.copy_(0.1 * torch.randn(module.num_features, generator=drawn))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=drawn))
    return model


@dataclass(frozen=True)
class Network:
    """One row of the table."""

    name: str
    dtype: torch.dtype
    tile: int
    rate: float
    tolerance: float
    pixels: bool
    """Whether the loss is over pixels."""
    part: int = 1
    """The side of the slide is divided by this."""

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        if self.name.startswith("resnet18"):
            return _fixed(torchvision_model("resnet18")).to(self.dtype)
        return _fixed(UNet(3, 2, width=4, depth=3)).to(self.dtype)


NETWORKS = (
    Network("unet-float64", torch.float64, 1024, 1e-3, 1e-10, True, 8),
    Network("unet", torch.float32, 4096, 1e-3, 1e-4, True),
    Network("resnet18", torch.float32, 4096, 1e-6, 1e-4, False),
)


def _example(network: Network, size: int) -> torch.Tensor:
    """What is recorded; the slide itself is given to every step."""
    return torch.empty(1, 3, size, size, dtype=network.dtype, device="meta")


def train(number: int, plan: dict[str, Any], size: int, steps: int, folder: str, most_s: float) -> dict[str, Any]:
    """On one rank: losses, seconds of steps, peaks; the first rank writes its gradients to a folder."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    faulthandler.dump_traceback_later(most_s, exit=True)  # a case that takes too long says where it is, and ends
    network, began = NETWORKS[number], time.perf_counter()
    slide = Slide(size, network.dtype)
    target = Labels(slide) if network.pixels else torch.tensor([3])
    made = outcore.Plan.from_json(plan)
    with Engine(
        network.build(),  # not a job, whose batch norms would be put into training mode
        made,
        loss=outcore.stream.PixelLoss(F.cross_entropy) if network.pixels else F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=network.rate),
        example=_example(network, size),
        device=os.environ.get("SLIDE_DEVICE"),
    ) as engine:
        cuda = engine.device.type == "cuda"
        gradients: list[dict[str, torch.Tensor]] = []
        if engine.rank == 0:
            engine.update.before_step = lambda: gradients.append(
                {n: p.grad.cpu().clone() for n, p in engine.parameters.items() if p.grad is not None}
            )
        ready_s, losses, times = time.perf_counter() - began, [], []
        for _ in range(steps):
            engine.world.barrier()
            if cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            losses.append(engine.step(slide, target))
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            if engine.rank == 0:
                print(f"{network.name} on {made.ranks}: ready {ready_s:.1f} s, step {times[-1]:.2f} s", flush=True)
        peaks = {}
        if cuda:
            peaks = {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        if engine.rank == 0:
            torch.save(gradients, Path(folder) / f"{network.name}-{made.ranks}.pt")
    faulthandler.cancel_dump_traceback_later()
    return {"losses": losses, "step_s": times, "ready_s": ready_s, **peaks}


def _plan(network: Network, size: int, grid: list[int], tile: int) -> outcore.Plan:
    graph = outcore.capture(network.build(), _example(network, size))
    spatial: dict[str, Any] = {"grid": grid, "tile": tile}
    if network.pixels:
        spatial["loss"] = "parts"
    return outcore.Plan(graph.fingerprint, (("",),), spatial=spatial, exactness="reassociated")


def _compared(network: Network, folder: str) -> dict[str, Any]:
    """By step: the largest difference of a gradient over the largest gradient."""
    one, four = (torch.load(Path(folder) / f"{network.name}-{n}.pt", weights_only=True) for n in (1, 4))
    found = []
    for mine, theirs in zip(four, one, strict=True):
        largest = max(float(g.abs().max()) for g in theirs.values())
        found.append(max(float((mine[n] - theirs[n]).abs().max()) for n in theirs) / largest)
    return {
        "network": network.name,
        "parameters": len(one[0]),
        "gradient_differences": found,
        "tolerance": network.tolerance,
        "equal": all(d <= network.tolerance for d in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--size", type=int, default=32_768)
    parser.add_argument("--tile", type=int, default=None, help="Pixels of a tile's side; 2048 if not given.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit", type=float, default=220.0, help="Seconds after which no case is begun.")
    parser.add_argument("--most", type=float, default=70.0, help="Seconds after which a case is ended.")
    parser.add_argument("--device", default=None)
    parser.add_argument("--networks", nargs="*", default=[n.name for n in NETWORKS])
    given = parser.parse_args()
    if given.device is not None:
        os.environ["SLIDE_DEVICE"] = given.device
    began, rows, checks = time.monotonic(), list[dict[str, Any]](), list[dict[str, Any]]()
    given.out.mkdir(parents=True, exist_ok=True)
    with mps() as shared, tempfile.TemporaryDirectory() as folder:
        gpu = torch.cuda.is_available() and given.device != "cpu"  # asked when the server runs
        where = torch.cuda.get_device_name() if gpu else platform.processor()
        for number, network in enumerate(NETWORKS):
            if network.name not in given.networks:
                continue
            for grid in ([2, 2], [1, 1]):
                size, tile = given.size // network.part, given.tile or network.tile
                row: dict[str, Any] = {"network": network.name, "size": size, "grid": grid}
                row |= {"dtype": str(network.dtype).removeprefix("torch."), "tile": tile}
                rows.append(row)
                if time.monotonic() - began > given.limit:
                    row["error"] = "not begun: out of time"
                    continue
                try:
                    plan, most_s = _plan(network, size, grid, tile), given.most
                    row["ranks"] = launch(train, plan.ranks, number, plan.to_json(), size, given.steps, folder, most_s)
                    if grid == [1, 1] and "ranks" in rows[-2]:
                        checks.append(_compared(network, folder))
                        losses = [r["ranks"][0]["losses"] for r in rows[-2:]]
                        checks[-1]["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
                except Exception as error:  # it stays in the table
                    row["error"] = f"{type(error).__name__}: {error}"[:800]
                _write(given.out, {"device": where, "torch": torch.__version__, "mps": shared}, rows, checks)
                print(_line(row), flush=True)
    for check in checks:
        print(check, flush=True)
    _write(given.out, {"device": where, "torch": torch.__version__, "mps": shared}, rows, checks)


def _line(row: dict[str, Any]) -> str:
    begin = f"| {row['network']} {row['dtype']} {row['size']} px | {' x '.join(map(str, row['grid']))} "
    if "error" in row:
        return f"{begin}| {row['error'].splitlines()[0]} | | |"
    times = ", ".join(f"{s:.2f}" for s in row["ranks"][0]["step_s"])
    peaks = ", ".join(f"{r['peak_bytes'] / 2**30:.2f}" for r in row["ranks"] if "peak_bytes" in r) or "not counted"
    return f"{begin}| {times} | {peaks} | {row['ranks'][0]['losses'][-1]:.9f} |"


def _write(out: Path, facts: dict[str, Any], rows: list[dict[str, Any]], checks: list[dict[str, Any]]) -> None:
    (out / "slide.json").write_text(json.dumps({**facts, "rows": rows, "checks": checks}, indent=1))
    lines = ["| network | grid | seconds of the steps | peak of every rank, GiB | loss |", "|---|---|---|---|---|"]
    lines += [_line(row) for row in rows]
    for check in checks:
        worst = max(check["gradient_differences"])
        lines.append(
            f"\n{check['network']}: gradients of {check['parameters']} parameters differ by {worst:.2e} of the largest "
            f"at most (tolerance {check['tolerance']:g}), losses by {check['loss_difference']:.2e}."
        )
    (out / "slide.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
