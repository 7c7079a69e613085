"""A small classifier on synthetic data: the kind of model one tunes with a sweep."""

import torch
from torch import nn

size = 32


def model(width=32):
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def batch(size):
    x = torch.randn(size, 20)
    return x, (x[:, :5] * x[:, 5:10] + 0.5 * x[:, 10:15]).argmax(1)


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(params, lr=1e-3):
    return torch.optim.Adam(params, lr=lr)
