"""Networks of other libraries with a loss at the end, small enough to train on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.foreign.zoo import by_name


class WithLoss(nn.Module):
    """A model and its loss as one network that returns the loss."""

    def __init__(self, model: nn.Module, dense: bool = False) -> None:
        super().__init__()
        self.model, self.dense = model, dense

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        output = self.model(x)
        if isinstance(output, dict):
            output = output["logits"] if "logits" in output else output["out"]
        return F.mse_loss(output, target) if self.dense else F.cross_entropy(output, target)


def _images(name: str, side: int, batch: int = 2, **options: Any) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        import torchvision

        torch.manual_seed(0)
        model = getattr(torchvision.models, name)(**options)
        return WithLoss(model), (torch.randn(batch, 3, side, side), torch.zeros(batch, dtype=torch.long))

    return build


def _unet(side: int, batch: int = 2) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        from outcore.models import UNet

        torch.manual_seed(0)
        model = UNet()
        x = torch.randn(batch, 3, side, side)
        with torch.no_grad():
            shape = model.eval()(x).shape
        return WithLoss(model.train(), dense=True), (x, torch.randn(shape))

    return build


def _bert(length: int, batch: int = 2) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
        model = BertForSequenceClassification(config)
        return WithLoss(model), (torch.randint(1000, (batch, length)), torch.zeros(batch, dtype=torch.long))

    return build


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "ResNet-18": _images("resnet18", 128),
    "ResNet-50": _images("resnet50", 128),
    "VGG-11": _images("vgg11_bn", 64, num_classes=10),
    "U-Net": _unet(64),
    "DenseNet-121": _images("densenet121", 96),
    "MobileNet-v3": _images("mobilenet_v3_large", 128),
    "ViT": _images("vit_b_16", 224, batch=1),
    "Swin-T": _images("swin_t", 128),
    "BERT": _bert(128, batch=4),
}

__all__ = ["NETWORKS", "WithLoss", "by_name"]
