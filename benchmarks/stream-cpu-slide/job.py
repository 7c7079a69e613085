"""A small segmentation network with a skip."""

from __future__ import annotations

import torch
from torch import nn


class Segmenter(nn.Module):
    """Down by four, up again, joined with what was seen at half size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Sequential(nn.Conv2d(24, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        return self.head(torch.cat([self.up(self.second(fine)), fine], 1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Segmenter()


def batch(size: int) -> tuple[torch.Tensor, None]:
    return torch.rand(size, 3, 256, 256), None
