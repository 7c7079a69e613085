"""A small residual network on synthetic images: what one tunes before training the large one."""

import torch
import torch.nn.functional as F
from torch import nn

size = 32
_TEMPLATES = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def norm(channels):
    """Averages that follow within a few steps: a trial is first judged after sixteen."""
    return nn.BatchNorm2d(channels, momentum=0.5)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = norm(outside), norm(outside)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def model(width=32):
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    for inside, outside, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2)):
        layers.append(Block(inside * width, outside * width, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def batch(size):
    """Ten patterns, anywhere in the image, under noise."""
    labels, images = torch.randint(10, (size,)), torch.randn(size, 3, 32, 32)
    corners = torch.randint(24, (2, size, 1))
    rows, columns = (corner + torch.arange(8) for corner in corners)
    which, channels = torch.arange(size).view(-1, 1, 1, 1), torch.arange(3).view(1, -1, 1, 1)
    images[which, channels, rows[:, None, :, None], columns[:, None, None, :]] += 4 * _TEMPLATES[labels]
    return images, labels


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(params, lr=1e-3):
    return torch.optim.Adam(params, lr=lr)
