"""The networks of the frontier, each with a large input and with a batch of small ones, and where checkpoints go.

A network is built as its library builds it, dropouts and stochastic depth in it. Checkpoints stand where a user would
put them, in two granularities: *coarse* (stages, or groups of blocks) and *fine* (blocks; for language models, whose
blocks are called one by one, blocks are the coarse ones and their two halves the fine ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["NETWORKS", "Cast", "Network", "UNet3d", "draws", "loss_of"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class UNet3d(nn.Module):
    """A 3-D U-Net with instance norms and biases before them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList([Block3d(1 if i == 0 else widths[i - 1], w) for i, w in enumerate(widths)])
        self.up = nn.ModuleList([nn.ConvTranspose3d(widths[i + 1], widths[i], 2, stride=2) for i in range(3)])
        self.merge = nn.ModuleList([Block3d(2 * widths[i], widths[i]) for i in range(3)])
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, part in enumerate(self.down):
            x = part(x if i == 0 else F.max_pool3d(x, 2))
            skips.append(x)
        skips.pop()
        for i in (2, 1, 0):
            x = self.merge[i](torch.cat([self.up[i](x), skips.pop()], 1))
        return self.head(x)


class Half3d(nn.Sequential):
    """Convolution, instance norm, leaky ReLU."""

    def __init__(self, channels: int, outputs: int) -> None:
        norm = nn.InstanceNorm3d(outputs, affine=True)
        super().__init__(nn.Conv3d(channels, outputs, 3, padding=1), norm, nn.LeakyReLU(0.01, inplace=True))


class Block3d(nn.Sequential):
    """Two of them."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(Half3d(channels, outputs), Half3d(outputs, outputs))


class Cast(nn.Module):
    """A network under autocast, of a language model the loss."""

    def __init__(self, network: nn.Module, bf16: bool) -> None:
        super().__init__()
        self.network, self.bf16 = network, bf16

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            found = self.network(*args, **kwargs)
        return found.loss if hasattr(found, "loss") else found


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean of squares in float32; the loss itself where the network returns one."""
    return output if output.dim() == 0 else output.float().square().mean()


def draws(module: nn.Module) -> bool:
    """Whether random numbers are drawn in a module's forward."""
    kinds = ("Dropout", "StochasticDepth", "DropPath")
    return any(
        type(m).__name__.startswith(kinds) and getattr(m, "p", getattr(m, "drop_prob", 0)) > 0 for m in module.modules()
    )


def _grouped(layers: nn.Sequential, ends: Callable[[int, nn.Module], bool]) -> nn.Sequential:
    """The same layers as a sequence of sequences."""
    parts: list[nn.Module] = []
    part: list[nn.Module] = []
    for i, layer in enumerate(layers):
        part.append(layer)
        if ends(i, layer):
            parts.append(nn.Sequential(*part))
            part = []
    return nn.Sequential(*parts, *([nn.Sequential(*part)] if part else []))


def _of_class(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [m for m in model.modules() if type(m).__name__ in names]


def _at(*paths: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [model.get_submodule(path) for path in paths]


def _groups_of(path: str, ends: Callable[[int, nn.Module], bool]) -> Callable[[nn.Module], list[nn.Module]]:
    """Parts that are made here of a sequence of layers."""

    def parts(model: nn.Module) -> list[nn.Module]:
        parent, _, name = path.rpartition(".")
        grouped = _grouped(model.get_submodule(path), ends)
        setattr(model.get_submodule(parent), name, grouped)
        return list(grouped)

    return parts


@dataclass(frozen=True)
class Network:
    """How it is built, what it takes, where checkpoints go."""

    name: str
    build: Callable[[str], nn.Module]
    """Takes the size of its input."""
    sizes: dict[str, tuple[int, ...]]
    """Shapes of the input: "large", "batch", "tiny"."""
    coarse: Callable[[nn.Module], list[nn.Module]]
    fine: Callable[[nn.Module], list[nn.Module]]
    words: int = 0
    """Size of the vocabulary of a language model."""

    def batch(self, size: str, device: str, channels_last: bool) -> Batch:
        """The input, the same every time."""
        shape = self.sizes[size]
        generator = torch.Generator(device).manual_seed(2)
        if self.words:
            ids = torch.randint(0, 300 if size == "tiny" else self.words, shape, device=device, generator=generator)
            return (), {"input_ids": ids, "labels": ids}
        images = torch.randn(*shape, device=device, generator=generator)
        return (ordered(images, channels_last),), {}

    @property
    def has_layouts(self) -> bool:
        """Whether channels can be first or last."""
        return not self.words


def ordered(images: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Images or volumes with their channels where they are asked for."""
    if not channels_last:
        return images
    return images.to(memory_format=torch.channels_last if images.dim() == 4 else torch.channels_last_3d)


def _torchvision(name: str, **options: Any) -> Callable[[str], nn.Module]:
    def build(size: str) -> nn.Module:
        from benchmarks.frontier.preload import torchvision

        return getattr(torchvision.models, name)(weights=None, **options)

    return build


def _vit(size: str) -> nn.Module:
    from benchmarks.frontier.preload import torchvision

    return torchvision.models.vit_b_16(weights=None, image_size={"large": 1024, "batch": 224, "tiny": 64}[size])


def _unet(size: str) -> nn.Module:
    from outcore.models import UNet

    return UNet(width=8, depth=2) if size == "tiny" else UNet()


_TINY = {"vocab_size": 300}


def _bert(size: str) -> nn.Module:
    from benchmarks.frontier.preload import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return transformers.BertForMaskedLM(transformers.BertConfig(**(_TINY | small if size == "tiny" else {})))


def _gpt(size: str) -> nn.Module:
    from benchmarks.frontier.preload import transformers

    small = _TINY | {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64}
    options = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **(small if size == "tiny" else {})))


def _images(large: int, batch: int = 64, side: int = 224, tiny: int = 64) -> dict[str, tuple[int, ...]]:
    return {"large": (1, 3, large, large), "batch": (batch, 3, side, side), "tiny": (2, 3, tiny, tiny)}


_STAGES = _at(*(f"features.{i}" for i in (1, 3, 5, 7)))

_ALL: Sequence[Network] = (
    Network(
        "resnet50",
        _torchvision("resnet50"),
        _images(4096),
        _at("layer1", "layer2", "layer3", "layer4"),
        _of_class("Bottleneck"),
    ),
    Network(
        "gpt",
        _gpt,
        {"large": (8, 1024), "batch": (64, 128), "tiny": (2, 64)},
        _of_class("GPT2Block"),
        _of_class("GPT2Attention", "GPT2MLP"),
        words=50257,
    ),
    Network(
        "convnext_tiny",
        _torchvision("convnext_tiny"),
        _images(4096),
        _STAGES,
        _of_class("CNBlock"),
    ),
    Network(
        "vit_b_16",
        _vit,
        {"large": (4, 3, 1024, 1024), "batch": (64, 3, 224, 224), "tiny": (2, 3, 64, 64)},
        _groups_of("encoder.layers", lambda i, _: i % 3 == 2),
        _of_class("EncoderBlock"),
    ),
    Network(
        "unet",
        _unet,
        _images(4096, 16, 256),
        lambda model: [model.encoder1, *_of_class("Encoder", "Decoder")(model)],
        _of_class("Convolutions"),
    ),
    Network(
        "densenet121",
        _torchvision("densenet121"),
        _images(4096),
        _of_class("_DenseBlock"),
        _of_class("_DenseLayer", "_Transition"),
    ),
    Network(
        "unet3d",
        lambda size: UNet3d(4 if size == "tiny" else 24),
        {"large": (1, 1, 160, 160, 160), "batch": (8, 1, 64, 64, 64), "tiny": (1, 1, 16, 16, 16)},
        _of_class("Block3d"),
        _of_class("Half3d"),
    ),
    Network(
        "swin_t",
        _torchvision("swin_t"),
        _images(2048),
        _STAGES,
        _of_class("SwinTransformerBlock"),
    ),
    Network(
        "bert",
        _bert,
        {"large": (16, 512), "batch": (64, 128), "tiny": (2, 32)},
        _of_class("BertLayer"),
        _of_class("BertAttention", "BertIntermediate", "BertOutput"),
        words=30522,
    ),
    Network(
        "vgg19",
        _torchvision("vgg19"),
        _images(4096),
        _groups_of("features", lambda i, m: "Pool" in str(type(m))),
        _groups_of("features", lambda i, m: "ReLU" in str(type(m))),
    ),
    Network(
        "mobilenet_v3",
        _torchvision("mobilenet_v3_large"),
        _images(4096, 128),
        _groups_of("features", lambda i, _: i % 4 == 3),
        _of_class("InvertedResidual"),
    ),
    Network(
        "inception_v3",
        _torchvision("inception_v3", init_weights=False, aux_logits=False),
        _images(4096, 64, 299, 96),
        _of_class(*(f"Inception{x}" for x in "ABCDE")),
        _of_class("BasicConv2d"),
    ),
)
NETWORKS: dict[str, Network] = {network.name: network for network in _ALL}
"""In the order in which they are measured."""
