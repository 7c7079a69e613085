"""U-Net: skips as long as the network.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (MICCAI 2015,
arXiv:1505.04597), with padded convolutions, so that the output has the size of the input, and batch
normalisation; in three dimensions as Çiçek et al. do (MICCAI 2016, arXiv:1606.06650), with the same widths.

    encoder1 ────────────────────────────▶ decoder1 ─ head
       encoder2 ──────────────────▶ decoder2
          encoder3 ────────▶ decoder3
              ...    bottom

An example of long skips: the first and largest activation is needed again by the last block, so it lives
through the whole step, and a pipeline must carry it from the first stage to the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import ModelError

CONVOLUTION = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMALISATION = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class Convolutions(nn.Sequential):
    """Two 3x3 convolutions, each with batch normalisation and ReLU."""

    def __init__(self, channels: int, outputs: int, dims: int) -> None:
        super().__init__()
        # The bias would be cancelled by the normalisation that follows.
        self.conv1 = CONVOLUTION[dims](channels, outputs, 3, padding=1, bias=False)
        self.norm1 = NORMALISATION[dims](outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = CONVOLUTION[dims](outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = NORMALISATION[dims](outputs)
        self.relu2 = nn.ReLU()


class Encoder(nn.Sequential):
    """Halve the image (an odd last row is dropped), then convolve."""

    def __init__(self, channels: int, outputs: int, dims: int) -> None:
        super().__init__()
        self.pool = POOL[dims](2)
        self.convolutions = Convolutions(channels, outputs, dims)


class Decoder(nn.Module):
    """Double the image, join the skip of the same level, then convolve."""

    def __init__(self, channels: int, outputs: int, dims: int) -> None:
        super().__init__()
        self.up = TRANSPOSED[dims](channels, outputs, 2, stride=2)
        self.convolutions = Convolutions(2 * outputs, outputs, dims)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        missing = [s - u for s, u in zip(skip.shape[2:], x.shape[2:], strict=True)]
        if any(missing):
            # Zeros at the far end, where the pool dropped a row: every other pixel stays where it was.
            x = F.pad(x, [pad for size in reversed(missing) for pad in (0, size)])
        out: Tensor = self.convolutions(torch.cat([skip, x], dim=1))
        return out


class UNet(nn.Module):
    """U-Net for images or volumes of any size from ``2**depth`` pixels a side.

    >>> net = UNet(channels=1, classes=3, width=8, depth=2)
    >>> net(torch.zeros(1, 1, 37, 50)).shape
    torch.Size([1, 3, 37, 50])

    Args:
        width: channels of the first level, doubled at each level below.
        depth: how often the image is halved.
        dims: 2 for images, 3 for volumes.
    """

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64, depth: int = 4, dims: int = 2) -> None:
        super().__init__()
        if dims not in (2, 3):
            raise ModelError(f"dims={dims} is not supported: give dims=2 for images or dims=3 for volumes")
        if depth < 1:
            raise ModelError(f"depth={depth} is too small: give at least depth=1")
        self.depth = depth
        self.encoder1 = Convolutions(channels, width, dims)
        for level in range(2, depth + 1):
            self.add_module(f"encoder{level}", Encoder(width * 2 ** (level - 2), width * 2 ** (level - 1), dims))
        self.bottom = Encoder(width * 2 ** (depth - 1), width * 2**depth, dims)
        for level in range(depth, 0, -1):
            self.add_module(f"decoder{level}", Decoder(width * 2**level, width * 2 ** (level - 1), dims))
        self.head = CONVOLUTION[dims](width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        if min(image.shape[2:]) < 2**self.depth:
            raise ModelError(
                f"an image of {'x'.join(map(str, image.shape[2:]))} pixels cannot be halved {self.depth} "
                f"times: give at least {2**self.depth} pixels a side, or a smaller depth"
            )
        skips: list[Tensor] = [self.encoder1(image)]
        for level in range(2, self.depth + 1):
            skips.append(self.get_submodule(f"encoder{level}")(skips[-1]))
        x = self.bottom(skips[-1])
        for level in range(self.depth, 0, -1):
            x = self.get_submodule(f"decoder{level}")(x, skips.pop())
        scores: Tensor = self.head(x)
        return scores
