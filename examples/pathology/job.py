"""Two kinds of tissue told apart on whole slides: ResNet-110-v2 with a norm that streams.

norm=pixel     layer norm over the channels of each pixel: tiles give exactly what the whole slide gives
norm=batch     batch norm, for the warm-up on crops
norm=frozen    batch norm with the statistics (and weights) of that warm-up, fixed from then on
"""

import os

import torch
from torch import nn

from outcore.models import ResNet110V2
from outcore.models.slidenet import PixelNorm
from outcore.run.checkpoint.restore import read_weights

SIDE = int(os.environ.get("SIDE", "2048"))


class FrozenNorm(nn.BatchNorm2d):
    """Batch norm that stays at its statistics in train mode too."""

    def train(self, mode=True):
        return super().train(False)


def model(depth=110, norm="pixel", weights=None):
    net = ResNet110V2(classes=2, depth=depth, norm={"pixel": PixelNorm, "frozen": FrozenNorm}.get(norm, norm))
    if weights is not None and not next(net.parameters()).is_meta:
        net.load_state_dict(read_weights(weights))
    return net


def batch(size):
    return torch.rand(size, 3, SIDE, SIDE), torch.randint(2, (size,))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
