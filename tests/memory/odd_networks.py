"""Networks nobody would write: layers drawn at random, with the sizes at which layouts and encodings change.

Over images and volumes: single pixels and channels, windows wider than a byte can tell, strides beyond the kernel,
frozen layers, in-place operations on what is still needed, views, skips, and random numbers of every kind. Each number
is another network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foreign.foreign import Foreign, floats

Piece = tuple[Callable[[Tensor], Tensor], nn.Module | None]


def odd_network(number: int) -> Foreign:
    """A network over images, and how to feed it."""
    shape = _Images(number).shape()
    return Foreign(f"odd/{number}", lambda: _Sees(_Images(number)), lambda n: ((floats(n, *shape),), {}), quick=True)


def odd_volume(number: int) -> Foreign:
    """The same over volumes."""
    shape = _Volumes(number).shape()
    build = lambda: _Sees(_Volumes(number))  # noqa: E731
    return Foreign(f"odd volume/{number}", build, lambda batch: ((floats(batch, *shape),), {}), quick=True)


class Chain(nn.Module):
    """Pieces one after the other, some with what goes in added to what comes out."""

    def __init__(self, draw: Draw, x: Tensor) -> None:
        super().__init__()
        self.parts, self.ways, self.skips = nn.ModuleList(), [], []
        for _ in range(draw.between(3, 9)):
            way, part = draw.piece(tuple(x.shape[1:]))
            with torch.no_grad():
                made = way(x.clone())
            if not 0 < made.numel() < 40_000:
                continue
            if part is not None:
                self.parts.append(part)
            self.ways.append(way)
            self.skips.append(made.shape == x.shape and draw.likely(0.3))
            x = made
        self.made = x

    def forward(self, x: Tensor) -> Tensor:
        for way, skip in zip(self.ways, self.skips, strict=True):
            made = way(x)
            x = x + made if skip else made
        return x


class Draw:
    """Draws pieces of networks, the same for the same number."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def likely(self, chance: float) -> bool:
        return self.random.random() < chance

    def piece(self, shape: tuple[int, ...]) -> Piece:
        """What comes next, after a value of this shape, without the batch."""
        raise NotImplementedError


class _Sees(nn.Module):
    """A chain between a convolution and a classifier."""

    def __init__(self, draw: _Images | _Volumes) -> None:
        super().__init__()
        channels, *sizes = draw.shape()
        width = draw.one(1, 3, 8, 20)
        self.stem = (nn.Conv2d if len(sizes) == 2 else nn.Conv3d)(channels, width, 3, padding=1)
        self.chain = Chain(draw, torch.zeros(2, width, *sizes))
        self.head = nn.Linear(self.chain.made.shape[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.chain(self.stem(x)).flatten(2).mean(2))


class _Images(Draw):
    def shape(self) -> tuple[int, ...]:
        return self.one(1, 3, 4), self.one(1, 2, 5, 8, 19, 24), self.one(1, 2, 6, 8, 20, 24)

    def piece(self, shape: tuple[int, ...]) -> Piece:
        """What comes next."""
        kinds = (self.convolution, self.norm, self.activation, self.pool, self.noise, self.rearrangement, self.mixture)
        return self.one(*kinds, self.activation, self.pool)(shape)

    def convolution(self, shape: tuple[int, ...]) -> Piece:
        c, out = shape[0], self.one(1, 4, 8, 20)
        part: nn.Module = nn.Conv2d(c, out, self.one(1, 3), self.one(1, 1, 2), padding=1, bias=self.likely(0.7))
        if self.likely(0.2):
            part = nn.Conv2d(c, c, 3, padding=1, groups=c)
        elif self.likely(0.15):
            part = nn.ConvTranspose2d(c, out, 2, 2)
        return part, part.requires_grad_(self.likely(0.85))

    def norm(self, shape: tuple[int, ...]) -> Piece:
        c = shape[0]
        part: nn.Module = self.one(
            nn.BatchNorm2d(c), nn.BatchNorm2d(c), nn.GroupNorm(1, c), nn.BatchNorm2d(c, affine=False)
        )
        if shape[1] * shape[2] > 1 and self.likely(0.2):
            part = nn.InstanceNorm2d(c, affine=True)
        return part, part

    def activation(self, shape: tuple[int, ...]) -> Piece:
        inplace = self.likely(0.5)
        part = self.one(
            nn.ReLU(inplace), nn.ReLU(inplace), nn.ReLU(), nn.LeakyReLU(0.1, inplace), nn.ReLU6(inplace), nn.GELU(),
            nn.SiLU(inplace), nn.Hardswish(), nn.ELU(inplace=inplace), nn.Sigmoid(), nn.Tanh(), nn.PReLU(shape[0]),
            nn.Softmax(1),
        )  # fmt: skip
        return part, part

    def pool(self, shape: tuple[int, ...]) -> Piece:
        _, height, width = shape
        if self.likely(0.15):
            part: nn.Module = self.one(nn.AdaptiveAvgPool2d(self.one(1, 3)), nn.AdaptiveMaxPool2d(self.one(1, 2)))
            return part, part
        kernel = tuple(min(self.one(1, 2, 2, 3, 5, 17, 30), size) for size in (height, width))
        stride = tuple(self.one(1, 2, 2, 3, min(k, 17)) for k in kernel)
        padding = tuple(self.one(0, k // 2) for k in kernel)
        ceil = self.likely(0.3)
        if self.likely(0.2):
            part = nn.AvgPool2d(kernel, stride, padding, ceil)
            return part, part
        dilation = tuple(self.one(1, 2) if (k - 1) * 2 < s else 1 for k, s in zip(kernel, (height, width), strict=True))
        if self.likely(0.3):
            return lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode=ceil), None
        part = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
        return part, part

    def noise(self, shape: tuple[int, ...]) -> Piece:
        part: nn.Module = self.one(
            nn.Dropout(0.3), nn.Dropout(0.5, inplace=True), nn.Dropout2d(0.3), nn.AlphaDropout(0.2)
        )
        if self.likely(0.3):
            return self.one(
                lambda x: x * torch.rand(x.shape[1:], device=x.device), lambda x: x + torch.randn_like(x)
            ), None
        if self.likely(0.2):
            return lambda x: x * torch.rand(1).to(x.device), None  # on the host
        return part, part

    def rearrangement(self, shape: tuple[int, ...]) -> Piece:
        return self.one(
            lambda x: x.transpose(2, 3),
            lambda x: x.transpose(2, 3).contiguous().relu(),
            lambda x: x[:, :, ::2, 1:] if x.shape[3] > 1 else x.flip(2),
            lambda x: torch.cat([x, x.relu()], 1),
            lambda x: torch.cat(x.chunk(2, 1)[::-1], 1).tanh(),
            lambda x: x.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2),
            lambda x: F.interpolate(x, scale_factor=2),
            lambda x: F.pad(x, (1, 0, 0, 2)),
            lambda x: x.flatten(2).cumsum(-1).view(x.shape),
        ), None  # fmt: skip

    def mixture(self, shape: tuple[int, ...]) -> Piece:
        def attention(x: Tensor) -> Tensor:
            rows = x.flatten(2).transpose(1, 2).unsqueeze(1)
            read = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2)
            return read.squeeze(1).transpose(1, 2).reshape(x.shape)

        def overwritten(x: Tensor) -> Tensor:
            y = x * 2
            z = (y * 0.5).sin()
            y[:, :1] = x[:, :1]
            return z + y

        def added(x: Tensor) -> Tensor:
            y = x.clone()
            y += x.sigmoid()
            return F.relu_(y)

        return self.one(attention, overwritten, added, lambda x: x * x.amax((2, 3), keepdim=True).sigmoid()), None


class _Volumes(Draw):
    def shape(self) -> tuple[int, ...]:
        return self.one(1, 2), self.one(1, 3, 6), self.one(1, 4, 9), self.one(1, 5, 8)

    def piece(self, shape: tuple[int, ...]) -> Piece:
        """What comes next."""
        c, sizes = shape[0], shape[1:]
        kernel = tuple(min(self.one(1, 2, 3, 9), size) for size in sizes)
        stride = tuple(self.one(1, 2, k) for k in kernel)
        padding = tuple(self.one(0, k // 2) for k in kernel)
        part: nn.Module = self.one(
            nn.Conv3d(c, self.one(1, 4, 8), 3, padding=1),
            nn.BatchNorm3d(c),
            nn.ReLU(self.likely(0.5)),
            nn.ReLU(),
            nn.MaxPool3d(kernel, stride, padding, ceil_mode=self.likely(0.3)),
            nn.MaxPool3d(kernel, stride),
            nn.AvgPool3d(kernel, stride, padding),
            nn.AdaptiveAvgPool3d(self.one(1, 2)),
            nn.Dropout3d(0.3),
            nn.Dropout(0.3),
            nn.SiLU(),
        )
        return part, part
