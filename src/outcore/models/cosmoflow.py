"""CosmoFlow: cosmological parameters from a volume of dark matter.

Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale" (SC 2018, arXiv:1808.04728),
in the form with five equal blocks that later benchmarks settled on: convolution, leaky ReLU, pool; three
dense layers; and outputs scaled to just beyond the targets, which are normalised to [-1, 1].

An example of three dimensions: doubling the side takes eight times the memory. At 512 voxels a side the first
block alone saves more than 32 GiB for one volume.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outcore.errors import ModelError

BLOCKS = 5


class Block(nn.Sequential):
    """Convolution, leaky ReLU, and a pool that halves the volume."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, outputs, 3, padding=1)
        self.relu = nn.LeakyReLU(0.3)
        self.pool = nn.MaxPool3d(2)


class CosmoFlow(nn.Module):
    """Regression of ``outputs`` numbers from a cube of ``side`` voxels.

    >>> net = CosmoFlow(side=32, width=4)
    >>> net(torch.zeros(2, 4, 32, 32, 32)).shape
    torch.Size([2, 4])

    Args:
        side: voxels a side, at least 32; the first dense layer depends on it.
        channels: channels of the volume; the published data has four redshifts.
        width: channels of the first block, doubled in each block after it.
    """

    def __init__(
        self, side: int = 128, outputs: int = 4, channels: int = 4, width: int = 32, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if side < 2**BLOCKS:
            raise ModelError(f"side={side} cannot be halved {BLOCKS} times: give at least side={2**BLOCKS}")
        self.side = side
        for number in range(1, BLOCKS + 1):
            self.add_module(f"block{number}", Block(channels, width))
            channels, width = width, 2 * width
        self.flatten = nn.Flatten()
        self.dense = nn.Sequential(
            nn.Linear(channels * (side // 2**BLOCKS) ** 3, 128),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(64, outputs),
        )

    def forward(self, volume: Tensor) -> Tensor:
        if tuple(volume.shape[2:]) != (self.side,) * 3:
            raise ModelError(
                f"a volume of {'x'.join(map(str, volume.shape[2:]))} voxels was given to a network for "
                f"{self.side} a side: make it with CosmoFlow(side={volume.shape[2]}) or crop the volume"
            )
        x = volume
        for number in range(1, BLOCKS + 1):
            x = self.get_submodule(f"block{number}")(x)
        return 1.2 * torch.tanh(self.dense(self.flatten(x)))
