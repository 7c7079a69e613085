"""What the equivalence tests train and the throughput benchmark times: a network and a batch, at any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from outcore.fusion import Objective
from tests.foreign.shim import define_torchvision_operators
from tests.fusion.networks import (
    Bert,
    Gan,
    LstmTagger,
    PointNet,
    PointNetSegmentation,
    TransformerLM,
    discriminator_loss,
    generator_loss,
)

Optimizer = Callable[[Any, int], optim.Optimizer]


@dataclass(frozen=True)
class Workload:
    """A network to train many of, and what it is trained on."""

    build: Callable[[int], nn.Module]
    """The model of member `i`; settings that may differ between members do."""
    batch: Callable[[], tuple[Tensor, Tensor]]
    adversarial: bool = False
    """Two losses with an optimizer each instead of one on output and targets."""
    images: bool = False

    def objectives(self, optimizer: Optimizer) -> Mapping[str, Objective]:
        """The two losses of an adversarial one."""
        return {
            "d": Objective(discriminator_loss, lambda gan, i: optimizer(gan.discriminator.parameters(), i)),
            "g": Objective(generator_loss, lambda gan, i: optimizer(gan.generator.parameters(), i)),
        }


def vision(name: str, batch: int, size: int = 32, **settings: Callable[[int], Any]) -> Workload:
    """A network of torchvision on small images; settings are functions of the member."""

    def build(i: int) -> nn.Module:
        define_torchvision_operators()
        import torchvision

        made: nn.Module = getattr(torchvision.models, name)(num_classes=10, **{k: f(i) for k, f in settings.items()})
        return made

    return Workload(build, lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))), images=True)


def pointnet(batch: int, points: int, classes: int, width: int = 64) -> Workload:
    """PointNet for classification."""
    return Workload(
        lambda i: PointNet(classes, width, dropout=0.1 * (1 + i % 3)),
        lambda: (torch.randn(batch, 3, points), torch.randint(classes, (batch,))),
    )


def pointnet_segmentation(batch: int, points: int, classes: int, width: int = 64) -> Workload:
    """PointNet for a class per point."""
    return Workload(
        lambda i: PointNetSegmentation(classes, width),
        lambda: (torch.randn(batch, 3, points), torch.randint(classes, (batch, points))),
    )


def transformer(batch: int, length: int, words: int, *sizes: int) -> Workload:
    """A language model; sizes as `TransformerLM` takes them."""
    return Workload(
        lambda i: TransformerLM(words, *sizes, dropout=0.1 * (1 + i % 3)), _tokens(batch, length, words, words)
    )


def bert(batch: int, length: int, words: int, *sizes: int) -> Workload:
    """BERT; sizes as `Bert` takes them, by default the medium one."""
    return Workload(lambda i: Bert(words, *sizes), _tokens(batch, length, words, words))


def lstm(batch: int, length: int, words: int, size: int, hidden: int, tags: int) -> Workload:
    """A tagger of two bidirectional layers."""
    return Workload(lambda i: LstmTagger(words, size, hidden, tags), _tokens(batch, length, words, tags))


def gan(batch: int, width: int = 64, noise: int = 100) -> Workload:
    """DCGAN on 64 x 64 images."""
    return Workload(
        lambda i: Gan(width, noise),
        lambda: (torch.randn(batch, 3, 64, 64), torch.randn(batch, noise, 1, 1)),
        adversarial=True,
        images=True,
    )


def _tokens(batch: int, length: int, words: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(words, (batch, length)), torch.randint(classes, (batch, length)))


USUAL: dict[str, Workload] = {
    "transformer-b20": transformer(20, 35, 10_000),
    "resnet18-b32": vision("resnet18", 32),
    "resnet18-b128": vision("resnet18", 128),
    "mobilenet-v3-b64": vision("mobilenet_v3_large", 64),
    "dcgan-b64": gan(64),
    "bert-medium-b8": bert(8, 64, 30_522),
    "lstm-b32": lstm(32, 40, 1000, 64, 64, 10),
    "pointnet-cls-b32": pointnet(32, 2500, 16),
    "pointnet-seg-b32": pointnet_segmentation(32, 2500, 8),
}
"""At the sizes and batch sizes at which people train them."""

TINY: dict[str, Workload] = {
    "transformer-b20": transformer(2, 6, 30, 8, 2, 16, 2),
    "resnet18-b32": vision("resnet18", 4),
    "resnet18-b128": vision("resnet18", 8),
    "mobilenet-v3-b64": vision("mobilenet_v3_large", 4),
    "dcgan-b64": gan(2, 2, 5),
    "bert-medium-b8": bert(2, 6, 30, 8, 2, 2),
    "lstm-b32": lstm(2, 7, 30, 6, 5, 4),
    "pointnet-cls-b32": pointnet(8, 20, 5, 4),
    "pointnet-seg-b32": pointnet_segmentation(8, 12, 5, 4),
}
"""The same networks, small: to see that everything runs."""
