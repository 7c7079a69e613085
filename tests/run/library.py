"""Networks of torchvision and MONAI as jobs in float64, cut by the planner; made where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from tests.foreign.shim import define_torchvision_operators
from tests.run.networks import CASES, Case
from tests.run.training import alone, plain, train


def _resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 3, 2), num_init_features=16, bn_size=2, num_classes=3)


def _inception() -> nn.Module:
    from torchvision.models import GoogLeNet

    return GoogLeNet(num_classes=3, aux_logits=True, init_weights=False)


def _unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 3, 2, channels=(4, 8, 12), strides=(2, 2), num_res_units=1, norm="batch")


def _attention_unet() -> nn.Module:
    from monai.networks.nets import AttentionUnet

    return AttentionUnet(2, 3, 2, channels=(4, 8, 12), strides=(2, 2))


def _nested_unet() -> nn.Module:
    from monai.networks.nets import BasicUNetPlusPlus

    return BasicUNetPlusPlus(2, 3, 2, features=(4, 4, 6, 6, 8, 4), deep_supervision=True)


def _images(size: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, side, side).double(), torch.randn(size, 2, side, side).double()


def _classes(size: int, side: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Large enough that the last normalisation sees more than two numbers, which would blow up every rounding."""
    return torch.randn(size, 3, side, side).double(), torch.randint(3, (size,))


def _deep(output: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return sum(((F.mse_loss(o, target)) for o in output), torch.zeros((), dtype=target.dtype))


def _aux(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, torch.Tensor):  # in eval mode
        return F.cross_entropy(output, target)
    rest = 0.3 * (F.cross_entropy(output[1], target) + F.cross_entropy(output[2], target))
    return F.cross_entropy(output.logits, target) + rest


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "torchvision ResNet": (_resnet, _classes, F.cross_entropy),
    "torchvision DenseNet": (_densenet, _classes, F.cross_entropy),
    "torchvision GoogLeNet": (_inception, _classes, _aux),
    "MONAI UNet": (_unet, _images, F.mse_loss),
    "MONAI AttentionUnet": (_attention_unet, _images, F.mse_loss),
    "MONAI UNet++": (_nested_unet, _images, _deep),
}
NAMES = tuple(_MODELS)
RANDOM = ("torchvision GoogLeNet",)
"""Networks with dropout: the engine on one rank is their oracle, since masks are its own."""
CHAOTIC = ("torchvision GoogLeNet",)
"""Networks that cannot be compared after many steps: weights that differ by 1e-13 give losses that differ by a
hundredth after seven, in plain PyTorch too."""


@cache
def _register(name: str, stages: int) -> None:
    from outcore.planner import split
    from tests.planner.shape_weights import weights_from_shapes

    define_torchvision_operators()
    make, batch, loss = _MODELS[name]
    job = outcore.Job(model=lambda: make().double(), batch=batch, loss=loss, size=32)
    case = CASES.setdefault(name, Case(job, {}))
    graph = case.job.capture()
    case.cuts[stages] = split(graph, weights_from_shapes(graph), stages=stages).names


def train_library(name: str, plan: dict[str, Any], steps: int, size: int) -> dict[str, Any]:
    """On one rank of a world."""
    _register(name, plan["stages"])
    return train(name, plan, steps, size)


@cache
def library_oracle(name: str, pieces: int, steps: int, size: int) -> dict[str, Any]:
    """The same training without ranks."""
    _register(name, 2)
    return (alone if name in RANDOM else plain)(name, pieces, steps, size)
