"""Glass and kinds of tissue, pixel by pixel: a U-Net, whose skips reach from its first layer to its last."""

import torch

from outcore.models import UNet


def model(width=16, depth=4):
    return UNet(3, 4, width=width, depth=depth)


def batch(size):
    return torch.rand(size, 3, 512, 512), torch.randint(4, (size, 512, 512))


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=2e-3)
