"""A small convolutional network on synthetic pictures of circles and squares: what a sweep of it looks like.

outcore sweep examples/sweep/job.py --set lr=1e-3,3e-3,1e-2,3e-2 --set dropout=0.0,0.2 --steps 60
"""

import torch
from torch import nn

size = 32


def model(width=8, dropout=0.1):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, 2),
    )


def batch(size):
    """Noisy pictures of 16 x 16 pixels: a disc or a square of random place and size."""
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centre = 5 + 6 * torch.rand(size, 2, 1, 1)
    radius = 2 + 3 * torch.rand(size, 1, 1)
    dx, dy = (x - centre[:, 0]).abs(), (y - centre[:, 1]).abs()
    label = torch.randint(2, (size,))
    disc, square = (dx**2 + dy**2).sqrt() < radius, torch.maximum(dx, dy) < 0.9 * radius
    shape = torch.where(label.view(-1, 1, 1) == 1, square, disc)
    return (shape.float() + 0.3 * torch.randn(size, 16, 16)).unsqueeze(1), label


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(params, lr=1e-3):
    return torch.optim.Adam(params, lr=lr)
