"""The networks: jobs of torchvision and torch's own layers, each with the batch at which it is trained here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.models import UNet
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()


def images(name: str, batch: int, side: int = 224, **options: Any) -> outcore.Job:
    def model() -> nn.Module:
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(**options)
        return made

    def example(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, side, side), torch.randint(1000, (size,))

    return job(name, model, example, F.cross_entropy, batch)


def job(
    name: str,
    model: Callable[[], nn.Module],
    example: Callable[[int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    batch: int,
) -> outcore.Job:
    return outcore.Job(model=model, batch=example, loss=loss, optimizer=torch.optim.Adam, name=name, size=batch)


class Encoder(nn.Module):
    """A Transformer's encoder over words, with a classifier of every position."""

    def __init__(self, width: int = 512, layers: int = 6, words: int = 8000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.words(x)))
        return found


def _words(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(8000, (size, 128)), torch.randint(8000, (size, 128))


def _word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def _pixels(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 256, 256), torch.randint(2, (size, 256, 256))


VERIFIED = {
    "alexnet": images("alexnet", 128),
    "resnet18": images("resnet18", 64),
    "resnet50": images("resnet50", 64),
    "vgg11": images("vgg11", 64),
    "mobilenet_v2": images("mobilenet_v2", 64),
    "convnext_tiny": images("convnext_tiny", 32),
    "encoder": job("encoder", Encoder, _words, _word_loss, 64),
    "unet": job("unet", lambda: UNet(3, 2, width=32), _pixels, F.cross_entropy, 16),
}
SHARES = {
    **VERIFIED,
    "vgg19": images("vgg19", 32),
    "densenet121": images("densenet121", 32),
    "vit_b_16": images("vit_b_16", 32),
    "inception_v3": images("inception_v3", 32, 299, aux_logits=False, init_weights=False),
}
QUESTIONS = {
    name: ["amp", "channels_last", "fused", "graphs", f"batch={2 * made.size}", "amp+channels_last", "compile"]
    for name, made in VERIFIED.items()
}
