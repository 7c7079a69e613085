"""AlexNet: few large kernels, then nearly all parameters in three linear layers.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014, arXiv:1404.5997): the
network of the 2012 paper on one device.

An example of parameters being the memory: at small batches, offloading its activations saves little.
"""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """AlexNet for images of 63 pixels a side or more; two classes unless asked for more.

    >>> import torch
    >>> with torch.device("meta"):
    ...     AlexNet()(torch.zeros(1, 3, 224, 224)).shape
    torch.Size([1, 2])
    """

    def __init__(self, classes: int = 2, channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        self.block1 = nn.Sequential(
            nn.Conv2d(channels, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)
        )
        self.block2 = nn.Sequential(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2))
        self.block3 = nn.Sequential(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU())
        self.block4 = nn.Sequential(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU())
        self.block5 = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2))
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.block5(self.block4(self.block3(self.block2(self.block1(image)))))
        scores: Tensor = self.classifier(self.flatten(self.pool(x)))
        return scores
