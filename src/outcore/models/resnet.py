"""ResNet-110 v2: a deep chain of small blocks, each with a short skip.

He et al., "Identity Mappings in Deep Residual Networks" (ECCV 2016, arXiv:1603.05027), in the CIFAR form with
bottlenecks that the Keras examples made common: depth 9n + 2 in three stages of n blocks, normalisation and
ReLU before each convolution, biases in all of them. Pathology work on whole slides trains it on images of
thousands of pixels.

An example of depth: 110 layers hold few parameters and many activations, and every block can be a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Literal

from torch import Tensor, nn

from outcore.errors import ModelError

Norm = Literal["batch", "group", "none"] | Callable[[int], nn.Module]
"""How to normalise: by name, or a function from the number of channels to a module."""


def normalisation(norm: Norm, channels: int) -> nn.Module:
    """The module that ``norm`` asks for."""
    if callable(norm):
        return norm(channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(gcd(channels, 16), channels)
    if norm == "none":
        return nn.Identity()
    raise ModelError(f"norm={norm!r} is not known: give 'batch', 'group', 'none' or a function channels -> module")


class PreActivation(nn.Sequential):
    """Normalisation, ReLU, convolution."""

    def __init__(self, channels: int, outputs: int, kernel: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm = normalisation(norm, channels)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2)


class Bottleneck(nn.Module):
    """Three convolutions (1x1, 3x3, 1x1) added to the skip, which is projected where the shape changes.

    The first block of the network follows the stem's own normalisation and ReLU, so its first convolution
    stands bare.
    """

    def __init__(
        self, channels: int, middle: int, outputs: int, *, stride: int, project: bool, bare: bool, norm: Norm
    ) -> None:
        super().__init__()
        self.reduce: nn.Module
        if bare:
            self.reduce = nn.Conv2d(channels, middle, 1, stride)
        else:
            self.reduce = PreActivation(channels, middle, 1, stride, norm)
        self.conv = PreActivation(middle, middle, 3, 1, norm)
        self.expand = PreActivation(middle, outputs, 1, 1, norm)
        self.skip = nn.Conv2d(channels, outputs, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + self.expand(self.conv(self.reduce(x)))
        return out


class ResNet110V2(nn.Module):
    """Pre-activation ResNet with bottlenecks, for images of any size; it halves them twice.

    >>> import torch
    >>> net = ResNet110V2(classes=2, depth=29)
    >>> net(torch.zeros(2, 3, 33, 47)).shape
    torch.Size([2, 2])

    Args:
        depth: number of layers, 9n + 2.
        channels: channels of the image.
        norm: "batch", "group", "none", or a function from the number of channels to a module.
    """

    def __init__(self, classes: int = 10, depth: int = 110, channels: int = 3, norm: Norm = "batch") -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if blocks < 1 or rest:
            raise ModelError(f"depth={depth} is not 9n + 2 with n at least 1: try depth={9 * max(1, blocks) + 2}")
        self.stem = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), normalisation(norm, 16), nn.ReLU())
        inputs, middle = 16, 16
        for stage in range(3):
            outputs = 64 * 2**stage
            modules = nn.Sequential()
            for block in range(blocks):
                first = block == 0
                modules.append(
                    Bottleneck(
                        inputs,
                        middle,
                        outputs,
                        stride=2 if first and stage > 0 else 1,
                        project=first,
                        bare=first and stage == 0,
                        norm=norm,
                    )
                )
                inputs = outputs
            self.add_module(f"stage{stage + 1}", modules)
            middle = outputs
        self.head = nn.Sequential(
            normalisation(norm, inputs),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(inputs, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in ("stage1", "stage2", "stage3"):
            x = self.get_submodule(stage)(x)
        scores: Tensor = self.head(x)
        return scores
