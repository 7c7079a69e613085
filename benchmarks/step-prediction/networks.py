"""The networks: unmodified models of torchvision, transformers and ours, each with its loss as one module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()


class Training(nn.Module):
    """A model, its loss and its precision as one network that returns the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], bf16: bool) -> None:
        super().__init__()
        self.model, self.loss, self.bf16 = model, loss, bf16

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        kind = "cuda" if x.device.type == "cuda" else "cpu"  # also on meta tensors
        with torch.autocast(kind, torch.bfloat16, enabled=self.bf16):
            return self.loss(self.model(x), target)


@dataclass(frozen=True)
class Network:
    """How to build a model and a batch for it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    batches: tuple[int, ...]
    """Batch sizes: on a GPU two at which the device sets the pace, and one at which the host does."""


def captured(network: Network, row: dict[str, Any]) -> outcore.Graph:
    """The graph of a case; the weights are never filled in. Autocast needs a device that computes, even on shapes."""
    try:
        with torch.device("meta"):
            built = network.build()
        built = built.to_empty(device="cpu")
    except (RuntimeError, NotImplementedError):
        built = network.build()
    model = Training(built, network.loss, row["precision"] == "bf16").train()
    return outcore.capture(model, network.batch(row["batch"]))


def images(name: str, side: int, batches: tuple[int, ...], **options: Any) -> Network:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)(**options)
        return model

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, side, side), torch.randint(1000, (size,))

    return Network(build, batch, F.cross_entropy, batches)


def unet(side: int, batches: tuple[int, ...]) -> Network:
    def build() -> nn.Module:
        from outcore.models import UNet

        return UNet(3, 2)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 3, side, side), torch.randint(2, (size, side, side))

    return Network(build, batch, F.cross_entropy, batches)


def bert(length: int, batches: tuple[int, ...], **options: Any) -> Network:
    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(**options))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(1000, (size, length)), torch.randint(2, (size,))

    return Network(build, batch, lambda output, target: F.cross_entropy(output.logits, target), batches)


GPU = {
    "ResNet-18": images("resnet18", 224, (128, 256, 16)),
    "ResNet-50": images("resnet50", 224, (96, 192, 16)),
    "VGG-19": images("vgg19", 224, (64, 96, 4)),
    "AlexNet": images("alexnet", 224, (256, 512, 16)),
    "Inception-v3": images("inception_v3", 299, (96, 128, 16), aux_logits=False, init_weights=False),
    "DenseNet-121": images("densenet121", 224, (192, 256, 16)),
    "U-Net": unet(256, (16, 24, 2)),
    "MobileNet-v3": images("mobilenet_v3_large", 224, (192, 256, 16)),
    "ConvNeXt-T": images("convnext_tiny", 224, (128, 192, 16)),
    "ViT-B": images("vit_b_16", 224, (128, 192, 16)),
    "Swin-T": images("swin_t", 224, (192, 256, 16)),
    "BERT-base": bert(128, (256, 384, 16)),
}
"""The first two batches by one rule: by `outcore.estimate` the device needs at least 1.3 times as long as the host to
issue the step, in both precisions."""

_SMALL_BERT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
CPU = {
    "ResNet-18": images("resnet18", 96, (2, 4)),
    "ResNet-50": images("resnet50", 96, (2, 4)),
    "VGG-11": images("vgg11_bn", 64, (2, 4)),
    "VGG-19": images("vgg19", 64, (2, 4)),
    "AlexNet": images("alexnet", 96, (2, 4)),
    "Inception-v3": images("inception_v3", 128, (2, 4), aux_logits=False),
    "DenseNet-121": images("densenet121", 64, (2, 4)),
    "ConvNeXt-T": images("convnext_tiny", 64, (2, 4)),
    "U-Net": unet(64, (1, 2)),
    "MobileNet-v3": images("mobilenet_v3_large", 96, (2, 4)),
    "ViT": images("vit_b_16", 64, (1, 2), image_size=64),
    "Swin-T": images("swin_t", 64, (1, 2)),
    "BERT": bert(64, (2, 4), **_SMALL_BERT),
}
