"""Networks small enough for one core, with their weights in different places."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore


def _images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(10, (size,))


def _job(name: str, model: type[nn.Module], size: int) -> outcore.Job:
    return outcore.Job(
        model=model,
        batch=_images,
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
        name=name,
        size=size,
    )


class Convs(nn.Sequential):
    """Convolutions, as ResNets have them: much work, few weights (1.1 MiB)."""

    def __init__(self) -> None:
        widths = (3, 32, 64, 96, 128)
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(widths)
        ]
        super().__init__(*layers, nn.Sequential(nn.Flatten(), nn.Linear(512, 10)))


class Dense(nn.Sequential):
    """Convolutions before large fully connected layers, as VGG has them: 17 MiB of weights, nearly all at the end."""

    def __init__(self) -> None:
        convs = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        super().__init__(convs, nn.Sequential(nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)))


NETWORKS = {"convs": _job("convs", Convs, 32), "dense": _job("dense", Dense, 32)}
