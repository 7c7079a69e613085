"""A small network of convolution, normalisation and matrix product, and arrays of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import outcore


def small_net(i: int = 0) -> nn.Module:
    """The model of member `i`."""
    torch.manual_seed(i)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers).double()


def small_batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """What it is trained on."""
    torch.manual_seed(77)
    return [(torch.randn(4, 3, 6, 6).double(), torch.randint(5, (4,))) for _ in range(count)]


def momentum(params: Any, i: int) -> optim.Optimizer:
    """Another rate for every member."""
    return optim.SGD(params, 0.05 * (i + 1), momentum=0.9)


def small_array(members: int = 3, **settings: Any) -> outcore.fusion.FusedArray:
    """Members that differ in weights and rates."""
    settings = {"loss": F.cross_entropy, "optimizer": momentum} | settings
    return outcore.fuse([small_net(i) for i in range(members)], **settings)
