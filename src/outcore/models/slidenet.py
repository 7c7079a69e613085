"""A small classifier of slides that streams: local up to its pool, and a head that can compare.

Every layer before the pool is local, and its norm looks at one pixel at a time, so tiles give what the whole image
gives, whatever the batch size. (Train-mode BatchNorm and GroupNorm mix all pixels of an image: exact only with further
passes over it.) The head has a hidden layer because the mean over an image adds things up, and to tell whether two
pieces of tissue differ takes more than a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PixelNorm(nn.Module):
    """Layer norm over the channels of every pixel by itself.

    >>> PixelNorm(8)(torch.randn(1, 8, 5, 5)).mean(1).abs().max() < 1e-6
    tensor(True)
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        off = x - x.mean(1, keepdim=True)
        scaled = off * torch.rsqrt((off * off).mean(1, keepdim=True) + self.eps)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        return scaled * self.weight.view(shape) + self.bias.view(shape)


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = PixelNorm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(torch.relu(self.conv1(self.norm(x))))
        return x + y


class SlideNet(nn.Module):
    """Classes of images of any size, each side reduced sixteenfold before the pool.

    >>> SlideNet()(torch.zeros(1, 3, 96, 130)).shape
    torch.Size([1, 2])

    Args:
        classes: outputs.
        width: channels of the first stage; doubled in the next ones.
        depth: blocks of a stage.
    """

    def __init__(self, classes: int = 2, width: int = 8, depth: int = 1) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        stages: list[nn.Module] = []
        for before, channels in zip((width, *widths), widths, strict=False):
            if before != channels:
                stages += [PixelNorm(before), nn.Conv2d(before, channels, 2, stride=2)]
            stages += [_Block(channels) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.norm = PixelNorm(widths[-1])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(widths[-1], 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(torch.relu(self.norm(self.stages(self.stem(x))))))
        return scores
