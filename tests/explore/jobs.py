"""Jobs that the tests look at, as the files a user would write."""

from __future__ import annotations

from pathlib import Path

SMALL = """\
import torch
from torch import nn
from torch.nn import functional as F

size = 4


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block(3, 32)
        self.second = Block(32, 32)
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, image):
        a = self.first(image)
        b = self.second(a)
        return self.head(torch.cat([a, b], 1))


def model():
    return Net()


def batch(size):
    return torch.randn(size, 3, 64, 64), torch.randint(2, (size, 64, 64))


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(params):
    return torch.optim.Adam(params)
"""


def write(folder: Path, text: str = SMALL, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def line_of(text: str, words: str) -> int:
    """The number of the first line that contains some words."""
    return next(i for i, line in enumerate(text.splitlines(), 1) if words in line)
