"""Networks drawn at random, for budgets: convolutions, norms, large linear layers and attention, of some ten to some
hundred MiB in a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Drawn:
    """A network, its batch and its optimizer."""

    text: str
    model: nn.Module
    batch: torch.Tensor
    optimizer: Callable[[Any], torch.optim.Optimizer]


class UnderAutocast(nn.Module):
    """A network in bf16, which asks its first parameter where it is, as many do."""

    def __init__(self, network: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.network, self.enabled = network, enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = next(self.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.enabled):
            return self.network(x).float()


class Residual(nn.Module):
    """Adds what its branch makes."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


class Words(nn.Module):
    """A language model whose first and last layer may be one."""

    def __init__(self, words: int, width: int, depth: int, *, tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + torch.arange(tokens.shape[1], device=self.words.weight.device)[:, None] * 1e-3
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _norm(chance: random.Random, channels: int) -> nn.Module:
    kinds = [nn.BatchNorm2d(channels), nn.GroupNorm(4, channels), nn.InstanceNorm2d(channels, affine=True)]
    return chance.choice([*kinds, nn.Identity()])


def _activation(chance: random.Random) -> nn.Module:
    return chance.choice([nn.ReLU(inplace=True), nn.ReLU(), nn.GELU(), nn.SiLU()])


def _images(chance: random.Random, scale: int) -> tuple[nn.Module, torch.Tensor]:
    channels, side = chance.choice([16, 32, 64]), chance.choice([32, 48, 64]) // (1 if scale > 1 else 4)
    first = side
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(chance.randint(2, 8)):
        block = [nn.Conv2d(channels, channels, 3, padding=1), _norm(chance, channels), _activation(chance)]
        branch = nn.Sequential(*block)
        layers.append(Residual(branch) if chance.random() < 0.3 else branch)
        if side > 16 and chance.random() < 0.3:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    if chance.random() < 0.5:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    else:  # most of the parameters are one matrix
        width = chance.choice([64, 256, 512]) * scale // 4
        layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(49 * channels, width), nn.ReLU(inplace=True)]
        layers += [nn.Dropout(0.3), nn.Linear(width, 10)]
    batch = chance.choice([8, 32, 64]) if scale > 1 else 2
    return nn.Sequential(*layers), torch.randn(batch, 3, first, first)


def _features(chance: random.Random, scale: int) -> tuple[nn.Module, torch.Tensor]:
    width = chance.choice([128, 256, 512]) * scale // 4
    layers: list[nn.Module] = []
    for _ in range(chance.randint(2, 8)):
        norm = chance.choice([nn.LayerNorm(width), nn.Identity(), nn.Dropout(0.1)])
        branch = nn.Sequential(nn.Linear(width, width, bias=chance.random() < 0.7), norm, _activation(chance))
        layers.append(Residual(branch) if chance.random() < 0.3 else branch)
    layers.append(nn.Linear(width, chance.choice([10, 1000])))
    return nn.Sequential(*layers), torch.randn(chance.choice([16, 256, 4096]) if scale > 1 else 16, width)


def _words(chance: random.Random, scale: int) -> tuple[nn.Module, torch.Tensor]:
    words, width = chance.choice([1000, 8000]) * scale // 4, chance.choice([64, 128, 256])
    model = Words(words, width, chance.randint(1, 4), tied=chance.random() < 0.5)
    return model, torch.randint(0, words, (chance.choice([2, 8]), chance.choice([32, 128]) if scale > 1 else 8))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-4),
    "momentum": lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, 1e-5),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-5),
}


def drawn(seed: int, scale: int = 4) -> Drawn:
    """A network by its number; with a scale of one, small enough for a CPU."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kind = chance.choice(["images", "images", "features", "words"])
    network, batch = {"images": _images, "features": _features, "words": _words}[kind](chance, scale)
    name, bf16 = chance.choice(list(OPTIMIZERS)), chance.random() < 0.6
    size = sum(p.numel() for p in network.parameters())
    text = f"{seed}: {kind} {list(batch.shape)}, {size / 1e6:.1f}M, {'bf16' if bf16 else 'fp32'}, {name}"
    return Drawn(text, UnderAutocast(network, bf16), batch, OPTIMIZERS[name])
