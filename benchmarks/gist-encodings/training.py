"""Whether networks learn as well when what backward needs was rounded: loss and accuracy of ResNet-18, way by way.

    python benchmarks/gist-encodings/training.py --out results/2026-11-16-h200-training.json

Every way starts from the same weights and sees the same batches: ten smooth patterns, shifted by chance, under noise.
The exact ways must end with plain training's weights bit for bit; of the lossy ones the curve is written down, and
beside it that of plain training on other batches, which is how far apart two good trainings are.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from run import DEVICE, policy_for
from torch.nn import functional as F

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.evaluate import StepModel

WAYS = ("plain", "int8", "int4", "half", "lossless", "again", "plain on others")
CLASSES, SIDE, SHIFT = 10, 32, 4


class Patterns:
    """Batches of shifted patterns under noise, one after the other."""

    def __init__(self, seed: int, noise: float) -> None:
        first = torch.Generator().manual_seed(5)
        coarse = torch.randn(CLASSES, 3, 6, 6, generator=first)
        self.patterns = F.interpolate(coarse, size=SIDE, mode="bicubic").to(DEVICE)
        self.chance, self.noise = torch.Generator(DEVICE).manual_seed(seed), noise

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and what they show."""
        classes = torch.randint(CLASSES, (size,), generator=self.chance, device=DEVICE)
        by = torch.randint(-SHIFT, SHIFT + 1, (2, size, 1), generator=self.chance, device=DEVICE)
        place = torch.arange(SIDE, device=DEVICE)
        rows, columns = (place + by[0]) % SIDE, (place + by[1]) % SIDE
        images = self.patterns[classes[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        noise = torch.randn(images.shape, generator=self.chance, device=DEVICE)
        return (images + self.noise * noise).contiguous(), classes


def prepared(way: str, batch: int) -> torch.nn.Module:
    """The network, from the same weights every time, under a kind of encoding."""
    torch.manual_seed(0)
    model: torch.nn.Module = torchvision.models.resnet18(num_classes=CLASSES).to(DEVICE)
    if way.startswith("plain"):
        return model
    images = torch.randn(batch, 3, SIDE, SIDE, device=DEVICE)
    graph = outcore.capture(model, (images,))
    policy = policy_for(StepModel(graph, by_bytes(account(graph), 1e12), 0.0, None), way)
    outcore.within(model, [tuple(images.shape)], memory=None, plan=policy, quiet=True)
    return model


def trained(way: str, args: argparse.Namespace) -> dict[str, Any]:
    model = prepared(way, args.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    data, losses = Patterns(8 if "other" in way else 7, args.noise), []
    for _ in range(args.steps):
        images, classes = data.batch(args.batch)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    curve = torch.stack(losses).cpu()
    model.eval()
    with torch.no_grad():
        images, classes = Patterns(9, args.noise).batch(2048)
        right = float((model(images).argmax(1) == classes).float().mean())
    tenth = max(1, args.steps // 10)
    row = {"way": way, "accuracy": right, "last_tenth": float(curve[-tenth:].mean())}
    row["curve"] = [round(float(part.mean()), 4) for part in curve.split(tenth)]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    return row | {"weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--noise", type=float, default=1.5)
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    rows: list[dict[str, Any]] = []
    plain: torch.Tensor | None = None
    for way in args.ways.split(","):
        start = time.time()
        row = trained(way, args)
        weights = row.pop("weights")
        plain = weights if plain is None else plain
        row["weights_equal"] = torch.equal(weights, plain)
        rows.append(row)
        print(json.dumps(row), f"{time.time() - start:.0f} s", flush=True)
        document = {
            "steps": args.steps,
            "batch": args.batch,
            "rate": args.rate,
            "noise": args.noise,
            "device": DEVICE,
            "training": rows,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
