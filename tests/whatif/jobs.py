"""Small jobs that questions are asked of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore


def images(size: int = 4) -> outcore.Job:
    """Convolutions, norms and a classifier."""

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, 16, 16), torch.randint(10, (count,))

    return outcore.Job(
        model=model, batch=batch, loss=F.cross_entropy, optimizer=torch.optim.Adam, size=size, name="images"
    )
