"""Small networks with everything that makes pipelines hard, as jobs in float64, and where to cut them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore


@dataclass(frozen=True)
class Case:
    """A job with stages to cut it into, by their number."""

    job: outcore.Job
    cuts: dict[int, tuple[tuple[str, ...], ...]]


class UNet(nn.Module):
    """Two levels; the skip is read by the pool and by the decoder; odd sizes are padded."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.enc1 = nn.Conv2d(2, 4, 3, padding=1)
        self.enc2 = nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.pool = nn.MaxPool2d(2)
        self.mid = nn.Conv2d(6, 8, 3, padding=1)
        self.low = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.dec = nn.Conv2d(12, 4, 3, padding=1)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.norm(self.enc2(torch.relu_(self.enc1(x)))).relu()
        deep = self.low(self.mid(self.pool(skip)).relu())
        up = self.up(F.relu(deep, inplace=True))
        if up.shape != skip.shape:
            up = F.pad(up, (0, skip.shape[-1] - up.shape[-1], 0, skip.shape[-2] - up.shape[-2]))
        return self.head(torch.cat([self.dec(torch.cat([up, skip], 1)).relu(), x], 1))


class _Up(nn.Module):
    """One step of a decoder; there need not be a skip."""

    def __init__(self, skips: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 + skips, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.conv(x if skip is None else torch.cat([x, skip], 1)).relu(), skip


class MissingSkips(nn.Module):
    """None goes from block to block, and across every cut, where there is no skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.second, self.third = _Up(4), _Up(0), _Up(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.stem(x).relu()
        deep, kept = self.first(self.mid(skip), skip)
        deep, missing = self.second(deep, None)
        deep, _ = self.third(deep, kept if missing is None else missing)
        return self.head(deep)


class Residual(nn.Module):
    """Residual blocks with batch normalisation and in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(6, 6, 3, padding=1, bias=False),
                nn.BatchNorm2d(6),
                nn.ReLU(inplace=True),
                nn.Conv2d(6, 6, 3, padding=1, bias=False),
                nn.BatchNorm2d(6),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu_(x + block(x))
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """Inception: four branches of one value, put together, and an auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 2, 1)
        self.three = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 3, 5, padding=2))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 2, 1))
        self.aux = nn.Linear(4, 3)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.stem(x).relu()
        aux = self.aux(y.mean((2, 3)))
        y = torch.cat([self.one(y), self.three(y), self.five(y), self.pool(y)], 1)
        return self.head(y.relu().mean((2, 3))), aux


class Dense(nn.Module):
    """DenseNet: every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4 + 3 * i, 3, 3, padding=1) for i in range(4))
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.stem(x)]
        for layer in self.layers:
            values.append(layer(torch.cat(values, 1)).relu())
        return self.head(torch.cat(values, 1))


class Text(nn.Module):
    """A transformer with tied embeddings, dropout, and a mask that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return {"logits": self.out(self.norm(x))}


class Indices(nn.Module):
    """Unpooling by the pool's indices (ReLayNet): whole numbers travel along the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Conv2d(2, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.mid = nn.Conv2d(4, 4, 3, padding=1)
        self.unpool = nn.MaxUnpool2d(2)
        self.head = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enc(x).relu()
        z, where = self.pool(y)
        return self.head(torch.cat([self.unpool(self.mid(z).relu(), where), y], 1))


def _job(model: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Any, size: int = 8) -> outcore.Job:
    return outcore.Job(model=lambda: model().double(), batch=batch, loss=loss, size=size)


def images(size: int, side: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 2, side, side, dtype=torch.float64), torch.randn(size, 2, side, side, dtype=torch.float64)


def float_images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 2, 6, 6), torch.randn(size, 2, 6, 6)


def classes(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 2, 5, 5, dtype=torch.float64), torch.randint(3, (size,))


def tokens(size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mask = torch.zeros(size, 5, dtype=torch.bool)
    mask[:, -1] = torch.arange(size) % 2 == 0
    return {"tokens": torch.randint(11, (size, 5)), "mask": mask}, torch.randint(11, (size, 5))


def two_losses(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], target) + 0.3 * F.cross_entropy(output[1], target)


def text_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


CASES = {
    "unet": Case(
        _job(UNet, images, F.mse_loss),
        {
            2: (("enc1", "enc2", "norm"), ("pool", "mid", "low", "up", "dec", "head")),
            3: (("enc1", "enc2", "norm"), ("pool", "mid", "low"), ("up", "dec", "head")),
            4: (("enc1", "enc2", "norm", "pool"), ("mid",), ("low", "up"), ("dec", "head")),
        },
    ),
    "missing-skips": Case(
        _job(MissingSkips, images, F.mse_loss),
        {
            2: (("stem", "mid", "first"), ("second", "third", "head")),
            4: (("stem",), ("mid", "first"), ("second",), ("third", "head")),
        },
    ),
    "chain": Case(
        _job(lambda: nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))), images, F.mse_loss),
        {2: (("0", "1"), ("2", "3")), 4: (("0",), ("1",), ("2",), ("3",))},
    ),
    "unet-float": Case(
        outcore.Job(model=UNet, batch=float_images, loss=F.mse_loss, size=8),
        {2: (("enc1", "enc2", "norm"), ("pool", "mid", "low", "up", "dec", "head"))},
    ),
    "unet-bn": Case(
        _job(lambda: UNet(norm=True), images, F.mse_loss),
        {2: (("enc1", "enc2", "norm", "pool"), ("mid", "low", "up", "dec", "head"))},
    ),
    "resnet": Case(
        _job(Residual, classes, F.cross_entropy),
        {
            2: (("stem", "blocks.0"), ("blocks.1", "blocks.2", "head")),
            3: (("stem", "blocks.0"), ("blocks.1",), ("blocks.2", "head")),
            4: (("stem",), ("blocks.0",), ("blocks.1",), ("blocks.2", "head")),
        },
    ),
    "inception": Case(
        _job(Branches, classes, two_losses),
        {
            2: (("stem", "one", "aux"), ("three", "five", "pool", "head")),
            4: (("stem", "aux"), ("one", "three"), ("five",), ("pool", "head")),
        },
    ),
    "densenet": Case(
        _job(Dense, images, F.mse_loss),
        {
            2: (("stem", "layers.0", "layers.1"), ("layers.2", "layers.3", "head")),
            4: (("stem", "layers.0"), ("layers.1",), ("layers.2",), ("layers.3", "head")),
        },
    ),
    "transformer": Case(
        _job(Text, tokens, text_loss),
        {
            2: (("embed", "drop", "layers.0"), ("layers.1", "layers.2", "norm", "out")),
            4: (("embed", "drop"), ("layers.0",), ("layers.1",), ("layers.2", "norm", "out")),
        },
    ),
    "indices": Case(_job(Indices, images, F.mse_loss), {2: (("enc", "pool"), ("mid", "unpool", "head"))}),
}
