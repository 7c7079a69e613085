"""Can a network trained by streaming learn what only the whole image shows? And can one trained on patches?

    python benchmarks/stream-global-task/run.py --output results/….json

Two pieces of tissue lie on glass, each of one of two kinds; the label says whether the kinds differ. A patch narrower
than the gap between them sees at most one piece, so no classifier of patches can beat chance (`outcore.data.Scene`).
The same small network, from the same weights, is trained three ways: on whole images, on whole images streamed in
tiles, and on patches that carry the label of their image (at test time the mean of the scores of all patches).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from outcore.data import Scene
from outcore.stream import stream

SIDE, PATCH = 128, 16


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    scenes = [Scene((SIDE, SIDE), share=0.6, seed=seed + i, tile=16) for i in range(count)]
    assert all(scene.gap >= PATCH for scene in scenes)
    pixels = np.stack([s.region([(0, SIDE), (0, SIDE)]) for s in scenes])
    return torch.from_numpy(pixels).movedim(-1, 1).float() / 255 - 0.8, torch.tensor([s.label for s in scenes])


def patches(x: torch.Tensor) -> torch.Tensor:
    """(images, patches, 3, PATCH, PATCH), without overlap."""
    parts = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return parts.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def train(how: str, data: Any, test: Any, epochs: int, rate: float) -> dict[str, Any]:
    net = network()
    forward: Any = stream(net, tile=48) if how == "streamed" else net
    optimizer = torch.optim.Adam(net.parameters(), rate)
    order = torch.Generator().manual_seed(1)
    (x, y), losses = data, []
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(16):
            given, target = x[batch], y[batch]
            if how == "patches":
                given = patches(given)
                chosen = torch.randint(given.shape[1], (len(batch), 4), generator=order)
                given = given.gather(1, chosen[:, :, None, None, None].expand(-1, -1, *given.shape[2:])).flatten(0, 1)
                target = target.repeat_interleave(4)
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(given), target)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return {
        "how": how,
        "time_s": time.perf_counter() - start,
        "loss": losses[-1],
        "train_accuracy": accuracy(net, *data, how),
        "test_accuracy": accuracy(net, *test, how),
        "test_accuracy_of_one_patch": patch_accuracy(net, *test) if how == "patches" else None,
        "weights": copy.deepcopy(net.state_dict()),
    }


@torch.no_grad()
def accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor, how: str) -> float:
    scores = net(x)
    if how == "patches":
        parts = patches(x)
        scores = net(parts.flatten(0, 1)).softmax(1).view(*parts.shape[:2], 2).mean(1)
    return float((scores.argmax(1) == y).double().mean())


@torch.no_grad()
def patch_accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of single patches that show tissue."""
    parts = patches(x)
    tissue = parts.std((2, 3, 4)) > 0.02
    right = net(parts.flatten(0, 1)).argmax(1).view(parts.shape[:2]) == y[:, None]
    return float(right[tissue].double().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    options = parser.parse_args()
    data, test = images(240, 0), images(240, 10_000)
    rows = []
    weights = {}
    for how in ("whole", "streamed", "patches"):
        row = train(how, data, test, options.epochs, options.rate)
        weights[how] = row.pop("weights")
        rows.append(row)
        print(row, flush=True)
    apart = max(float((weights["whole"][k] - weights["streamed"][k]).abs().max()) for k in weights["whole"])
    document = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "epochs": options.epochs,
        "test_share_of_label_1": float(test[1].double().mean()),
        "largest_difference_of_weights": apart,
        "rows": rows,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
