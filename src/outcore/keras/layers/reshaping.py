"""Flatten, reshape, pad, crop, repeat and merge.

`Flatten` and `Reshape` see values as Keras has them, channels last; so a dense layer after them needs no reordering of
its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


@converts("layers.Flatten")
def _flatten(layer: Any, site: Site) -> Part:
    if layer.data_format == "channels_first" and site.rank > 2:
        return Part(Permuted((0, *range(2, site.rank), 1), nn.Flatten()))
    return Part(nn.Flatten() if site.rank > 1 else Reshape((1,)))


class Permuted(nn.Module):
    """A module after a permutation of dimensions."""

    def __init__(self, dims: tuple[int, ...], inner: nn.Module) -> None:
        super().__init__()
        self.dims, self.inner = dims, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Permute, then go on."""
        y: torch.Tensor = self.inner(x.permute(self.dims))
        return y


class Reshape(nn.Module):
    """The same elements in another shape, per sample."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the first dimension."""
        return x.reshape(x.shape[0], *self.shape)


@converts("layers.Reshape")
def _reshape(layer: Any, site: Site) -> Part:
    return Part(Reshape(tuple(-1 if n is None else n for n in layer.target_shape)))


class Permute(nn.Module):
    """Dimensions in another order."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Permute."""
        return x.permute(self.dims)


@converts("layers.Permute")
def _permute(layer: Any, site: Site) -> Part:
    return Part(Permute((0, *layer.dims)))


class Repeat(nn.Module):
    """A vector once per step."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C) to (N, times, C)."""
        return x.unsqueeze(1).expand(-1, self.times, -1)


@converts("layers.RepeatVector")
def _repeat(layer: Any, site: Site) -> Part:
    return Part(Repeat(layer.n))


def _pairs(amounts: Any) -> list[tuple[int, int]]:
    pairs = amounts if isinstance(amounts[0], (tuple, list)) else [amounts]
    return [(int(before), int(after)) for before, after in pairs]


def _first(layer: Any) -> bool:
    return bool(getattr(layer, "data_format", "channels_last") in ("channels_last", None))


class ZeroPad(nn.Module):
    """Zeros around an image."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.amounts = [amount for pair in reversed(pairs) for amount in pair]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad, or crop where an amount is negative."""
        return F.pad(x, self.amounts)


@converts("layers.ZeroPadding1D", "layers.ZeroPadding2D", "layers.ZeroPadding3D")
def _zero_padding(layer: Any, site: Site) -> Part:
    return Part(ZeroPad(_pairs(layer.padding)), _first(layer))


class Crop(nn.Module):
    """An image without its margin."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.pairs = tuple(pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cut every dimension that has a margin."""
        for dim, (before, after) in enumerate(self.pairs, start=2):
            if before or after:
                x = x.narrow(dim, before, x.shape[dim] - before - after)
        return x


@converts("layers.Cropping1D", "layers.Cropping2D", "layers.Cropping3D")
def _cropping(layer: Any, site: Site) -> Part:
    return Part(Crop(_pairs(layer.cropping)), _first(layer))


@converts("layers.UpSampling1D", "layers.UpSampling2D", "layers.UpSampling3D")
def _up_sampling(layer: Any, site: Site) -> Part:
    size = layer.size if isinstance(layer.size, (tuple, list)) else (layer.size,)
    how = getattr(layer, "interpolation", "nearest")
    if how not in ("nearest", "bilinear"):
        site.refuse(f"interpolation={how!r}", "nearest and bilinear are known")
    return Part(nn.Upsample(scale_factor=tuple(float(n) for n in size), mode=how), _first(layer))


class Merge(nn.Module):
    """Several values as one, element by element."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, *given: Any) -> torch.Tensor:
        """In the order given, as Keras does."""
        values = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        result: torch.Tensor = values[0]
        for value in values[1:]:
            if self.how in ("Add", "Average"):
                result = result + value
            elif self.how == "Subtract":
                result = result - value
            elif self.how == "Multiply":
                result = result * value
            elif self.how == "Maximum":
                result = torch.maximum(result, value)
            else:
                result = torch.minimum(result, value)
        return result / len(values) if self.how == "Average" else result

    def extra_repr(self) -> str:
        """What it does."""
        return self.how


@converts(*(f"layers.{how}" for how in ("Add", "Average", "Subtract", "Multiply", "Maximum", "Minimum")))
def _merge(layer: Any, site: Site) -> Part:
    if len(set(site.ranks)) > 1:
        site.refuse(f"its inputs have {sorted(set(site.ranks))} dimensions", "reshape them to one rank first")
    return Part(Merge(type(layer).__name__), site.keeps_layout())


class Concatenate(nn.Module):
    """Several values beside one another."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *given: Any) -> torch.Tensor:
        """Along one dimension."""
        values = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        return torch.cat(list(values), self.dim)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"


def channels_first_axis(axis: int, rank: int) -> int:
    """Where an axis of Keras' layout is when channels come first."""
    axis %= rank
    return axis if axis == 0 else 1 if axis == rank - 1 else axis + 1


@converts("layers.Concatenate", "ops.Concatenate")
def _concatenate(layer: Any, site: Site) -> Part:
    first = site.keeps_layout()
    return Part(Concatenate(channels_first_axis(layer.axis, site.rank) if first else layer.axis), first)


class Dot(nn.Module):
    """The product of two values summed over one dimension of each."""

    def __init__(self, axes: tuple[int, int], *, normalize: bool) -> None:
        super().__init__()
        self.axes, self.normalize = axes, normalize

    def forward(self, *given: Any) -> torch.Tensor:
        """Per sample."""
        values = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        left, right = (value.movedim(axis, -1) for value, axis in zip(values, self.axes, strict=True))
        if self.normalize:
            left, right = (v * torch.rsqrt((v * v).sum(-1, keepdim=True).clamp(min=1e-12)) for v in (left, right))
        n = left.shape[0]
        y: torch.Tensor = left.reshape(n, -1, left.shape[-1]) @ right.reshape(n, -1, right.shape[-1]).transpose(1, 2)
        y = y.reshape(n, *left.shape[1:-1], *right.shape[1:-1])
        return y.unsqueeze(-1) if y.ndim == 1 else y


@converts("layers.Dot")
def _dot(layer: Any, site: Site) -> Part:
    axes = (layer.axes, layer.axes) if isinstance(layer.axes, int) else tuple(layer.axes)
    return Part(Dot(axes, normalize=layer.normalize))
