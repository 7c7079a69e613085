"""One number from a volume of dark matter: how strongly it is clustered. A network in the form of CosmoFlow."""

import os

import torch
from torch.nn import functional as F

from outcore.models import CosmoFlow

SIDE = int(os.environ.get("SIDE", "128"))


def model(width=8):
    return CosmoFlow(side=SIDE, outputs=1, channels=1, width=width, dropout=0.2)


def batch(size):
    return torch.rand(size, 1, SIDE, SIDE, SIDE), torch.rand(size)


def loss(output, target):
    return F.mse_loss(output[:, 0], target.to(output.dtype))


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
