"""VGG-19: a chain whose memory is at one end and whose parameters are at the other.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015,
arXiv:1409.1556), configuration E.

An example of imbalance: the first block holds nearly half of the activations, the first linear layer most of
the parameters (102.8 of 139.6 million), and splitting the layers into equal counts balances neither.
"""

from __future__ import annotations

from torch import Tensor, nn

BLOCKS = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""Convolutions and channels of the five blocks."""


class VGG19(nn.Module):
    """VGG-19 for images of 32 pixels a side or more; two classes unless asked for more.

    >>> import torch
    >>> with torch.device("meta"):
    ...     VGG19()(torch.zeros(1, 3, 224, 224)).shape
    torch.Size([1, 2])
    """

    def __init__(self, classes: int = 2, channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__()
        for number, (convolutions, outputs) in enumerate(BLOCKS, start=1):
            block = nn.Sequential()
            for index in range(1, convolutions + 1):
                block.add_module(f"conv{index}", nn.Conv2d(channels, outputs, 3, padding=1))
                block.add_module(f"relu{index}", nn.ReLU())
                channels = outputs
            block.add_module("pool", nn.MaxPool2d(2))
            self.add_module(f"block{number}", block)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        for module in self.modules():
            # Without normalisation, the default initialisation makes sixteen layers fade to nothing.
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for number in range(1, len(BLOCKS) + 1):
            x = self.get_submodule(f"block{number}")(x)
        scores: Tensor = self.classifier(self.flatten(self.pool(x)))
        return scores
