"""ReLayNet: skips of integers beside skips of activations.

Roy et al., "ReLayNet: retinal layer and fluid segmentation of macular optical coherence tomography using
fully convolutional networks" (Biomedical Optics Express 2017, arXiv:1704.02161): three encoders, a
bottleneck, three decoders. An encoder hands over three values: the pooled activation to the next block, and
to its decoder the activation before the pool and the *positions* of the maxima, which the decoder uses to put
values back to where they came from.

An example of integer skips: the positions are int64, have no gradient, and must not be sent back, cast or
encoded as if they were activations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outcore.errors import ModelError


class Convolution(nn.Sequential):
    """Convolution that keeps the size, batch normalisation, ReLU."""

    def __init__(self, channels: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, kernel, padding=(kernel[0] // 2, kernel[1] // 2))
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()


class Encoder(nn.Module):
    """Convolve, then halve the image and remember where each maximum was."""

    def __init__(self, channels: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.convolution = Convolution(channels, outputs, kernel)
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip: Tensor = self.convolution(x)
        pooled, positions = self.pool(skip)
        return pooled, positions, skip


class Decoder(nn.Module):
    """Put each value back to where the encoder's maximum was, join the encoder's activation, convolve."""

    def __init__(self, channels: int, outputs: int, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.unpool = nn.MaxUnpool2d(2)
        self.convolution = Convolution(2 * channels, outputs, kernel)

    def forward(self, x: Tensor, positions: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.convolution(torch.cat([skip, self.unpool(x, positions)], dim=1))
        return out


class ReLayNet(nn.Module):
    """ReLayNet for images whose sides are multiples of 8.

    >>> net = ReLayNet(width=8)
    >>> net(torch.zeros(1, 1, 64, 40)).shape
    torch.Size([1, 10, 64, 40])

    Args:
        width: channels of every convolution.
        kernel: height and width of the kernels; the paper's are taller than wide, as retinal layers are flat.
    """

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 64, kernel: tuple[int, int] = (7, 3)) -> None:
        super().__init__()
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise ModelError(f"kernel={kernel} would change the size of the image: give two odd numbers")
        self.encoder1 = Encoder(channels, width, kernel)
        self.encoder2 = Encoder(width, width, kernel)
        self.encoder3 = Encoder(width, width, kernel)
        self.bottom = Convolution(width, width, kernel)
        self.decoder3 = Decoder(width, width, kernel)
        self.decoder2 = Decoder(width, width, kernel)
        self.decoder1 = Decoder(width, width, kernel)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        if height % 8 or width % 8:
            above = (-(-height // 8) * 8, -(-width // 8) * 8)
            raise ModelError(
                f"an image of {height}x{width} pixels cannot be halved three times exactly: "
                f"pad it to {above[0]}x{above[1]} with "
                f"torch.nn.functional.pad(image, (0, {above[1] - width}, 0, {above[0] - height}))"
            )
        x, positions1, skip1 = self.encoder1(image)
        x, positions2, skip2 = self.encoder2(x)
        x, positions3, skip3 = self.encoder3(x)
        x = self.bottom(x)
        x = self.decoder3(x, positions3, skip3)
        x = self.decoder2(x, positions2, skip2)
        x = self.decoder1(x, positions1, skip1)
        scores: Tensor = self.head(x)
        return scores
