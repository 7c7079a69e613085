"""Pooling, with TensorFlow's padding.

A maximum over a padded window ignores the padding, and so does TensorFlow's average: it divides by the number of
elements of the image in the window. Keras on torch does so too where both sides are padded alike; else it repeats the
last element. A twin does what the backend does on which the model was made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.installed import require_keras
from outcore.keras.layers.convolution import pad_same, same_padding
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []

_MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_MAX_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


class SameMaxPool(nn.Module):
    """The maximum of every window, padded as TensorFlow does."""

    def __init__(self, window: tuple[int, ...], stride: tuple[int, ...]) -> None:
        super().__init__()
        self.window, self.stride = window, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad with minus infinity, then take the maximum."""
        x, padding = pad_same(x, self.window, self.stride, value=-torch.inf)
        pool = _MAX_FUNCTIONS[x.ndim - 3]
        return pool(x, self.window, self.stride, padding)


class SameAvgPool(nn.Module):
    """The average of the elements of every window that are in the image."""

    def __init__(self, window: tuple[int, ...], stride: tuple[int, ...], repeat: bool = False) -> None:
        super().__init__()
        self.window, self.stride, self.repeat = window, stride, repeat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average with zeros for the padding, then divide by the share of the window that is in the image."""
        pool: Any = _AVERAGE_FUNCTIONS[x.ndim - 3]
        pads = [same_padding(n, w, s) for n, w, s in zip(x.shape[2:], self.window, self.stride, strict=True)]
        if all(before == after for before, after in pads):
            same: torch.Tensor = pool(x, self.window, self.stride, tuple(p for p, _ in pads), count_include_pad=False)
            return same
        flat = [amount for pair in reversed(pads) for amount in pair]
        if self.repeat:
            repeated: torch.Tensor = pool(F.pad(x, flat, mode="replicate"), self.window, self.stride)
            return repeated
        inside = F.pad(torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device), flat)
        share: torch.Tensor = pool(inside, self.window, self.stride)
        summed: torch.Tensor = pool(F.pad(x, flat), self.window, self.stride)
        return summed / share


def _first(layer: Any) -> bool:
    return bool(layer.data_format == "channels_last")


@converts(*(f"layers.{kind}Pooling{n}D" for kind in ("Max", "Average") for n in (1, 2, 3)))
def _pool(layer: Any, site: Site) -> Part:
    rank = site.rank - 2
    window, stride = tuple(layer.pool_size), tuple(layer.strides)
    largest = type(layer).__name__.startswith("Max")
    if layer.padding == "valid":
        return Part((_MAX if largest else _AVERAGE)[rank - 1](window, stride), _first(layer))
    if largest:
        return Part(SameMaxPool(window, stride), _first(layer))
    repeat = require_keras().backend.backend() == "torch"
    return Part(SameAvgPool(window, stride, repeat), _first(layer))


class GlobalPool(nn.Module):
    """The average or the maximum over all positions."""

    def __init__(self, *, largest: bool, keepdims: bool) -> None:
        super().__init__()
        self.largest, self.keepdims = largest, keepdims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce every dimension after the channels."""
        dims = tuple(range(2, x.ndim))
        return x.amax(dims, keepdim=self.keepdims) if self.largest else x.mean(dims, keepdim=self.keepdims)


@converts(*(f"layers.Global{kind}Pooling{n}D" for kind in ("Max", "Average") for n in (1, 2, 3)))
def _global_pool(layer: Any, site: Site) -> Part:
    return Part(GlobalPool(largest="Max" in type(layer).__name__, keepdims=layer.keepdims), _first(layer))


@converts(*(f"layers.Adaptive{kind}Pooling{n}D" for kind in ("Max", "Average") for n in (1, 2, 3)))
def _adaptive_pool(layer: Any, site: Site) -> Part:
    kind = "Max" if "Max" in type(layer).__name__ else "Avg"
    make = getattr(nn, f"Adaptive{kind}Pool{site.rank - 2}d")
    size = layer.output_size
    return Part(make(size if isinstance(size, int) else tuple(size)), _first(layer))
