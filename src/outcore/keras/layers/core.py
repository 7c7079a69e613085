"""Dense layers, embeddings, dropout and noise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.layers.activation import with_activation
from outcore.keras.layers.normalization import torch_dtype
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


def _plain(layer: Any, site: Site) -> None:
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        site.refuse("it has low-rank or quantized weights", "merge or remove them first")


@converts("layers.Dense")
def _dense(layer: Any, site: Site) -> Part:
    _plain(layer, site)
    kernel = layer._kernel if hasattr(layer, "_kernel") else layer.kernel
    inputs, units = (int(n) for n in kernel.shape)
    weights = [Weight(kernel, "weight", permute=(1, 0))]
    if layer.use_bias:
        weights.append(Weight(layer.bias, "bias"))
    return with_activation(Part(nn.Linear(inputs, units, bias=layer.use_bias), False, weights), layer.activation, site)


class EinsumLinear(nn.Module):
    """A dense layer over any axes, given as Einstein's sum."""

    def __init__(self, equation: str, shape: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
        super().__init__()
        self.equation = equation
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, and the bias."""
        y = torch.einsum(self.equation, x, self.weight)
        return y if self.bias is None else y + self.bias


@converts("layers.EinsumDense")
def _einsum_dense(layer: Any, site: Site) -> Part:
    _plain(layer, site)
    kernel = layer._kernel if hasattr(layer, "_kernel") else layer.kernel
    bias = None if layer.bias is None else tuple(int(n) for n in layer.bias.shape)
    module = EinsumLinear(layer.equation, tuple(int(n) for n in kernel.shape), bias)
    weights = [Weight(kernel, "weight")] + ([] if bias is None else [Weight(layer.bias, "bias")])
    return with_activation(Part(module, False, weights), layer.activation, site)


class IntegerEmbedding(nn.Embedding):
    """`nn.Embedding` that takes numbers of any dtype, as Keras does."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Look up."""
        whole = numbers.dtype in (torch.int32, torch.int64)
        return super().forward(numbers if whole else numbers.long())


@converts("layers.Embedding")
def _embedding(layer: Any, site: Site) -> Part:
    _plain(layer, site)
    if layer.mask_zero:
        site.refuse("mask_zero=True", "masks are not carried over; pass a mask as an input of its own")
    table = layer._embeddings
    numbers, width = (int(n) for n in table.shape)
    return Part(IntegerEmbedding(numbers, width), False, [Weight(table, "weight")])


@converts("layers.Masking")
def _masking(layer: Any, site: Site) -> Part:
    site.refuse("masks are not carried over", "pass a mask as an input of its own")


class SharedDropout(nn.Module):
    """Dropout whose mask is the same along some dimensions."""

    def __init__(self, rate: float, shape: tuple[int | None, ...]) -> None:
        super().__init__()
        self.rate, self.shape = rate, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draw the mask at its own size."""
        if not self.training or not self.rate:
            return x
        sizes = [n if given is None else given for n, given in zip(x.shape, self.shape, strict=True)]
        return x * F.dropout(torch.ones(sizes, dtype=x.dtype, device=x.device), self.rate, True)


@converts("layers.Dropout")
def _dropout(layer: Any, site: Site) -> Part:
    first = site.keeps_layout()
    if layer.noise_shape is None:
        return Part(nn.Dropout(layer.rate), first)
    shape = tuple(layer.noise_shape)
    if first:
        shape = (shape[0], shape[-1], *shape[1:-1])
    return Part(SharedDropout(layer.rate, shape), first)


@converts("layers.SpatialDropout1D", "layers.SpatialDropout2D", "layers.SpatialDropout3D")
def _spatial_dropout(layer: Any, site: Site) -> Part:
    first = getattr(layer, "data_format", "channels_last") == "channels_last"
    return Part(SharedDropout(layer.rate, (None, None, *(1,) * (site.rank - 2))), first)


class GaussianNoise(nn.Module):
    """Noise in training: added, or multiplied with."""

    def __init__(self, deviation: float, *, multiply: bool) -> None:
        super().__init__()
        self.deviation, self.multiply = deviation, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing in evaluation."""
        if not self.training or not self.deviation:
            return x
        noise = torch.randn_like(x) * self.deviation
        return x * (1 + noise) if self.multiply else x + noise


@converts("layers.GaussianNoise")
def _gaussian_noise(layer: Any, site: Site) -> Part:
    return Part(GaussianNoise(layer.stddev, multiply=False), site.keeps_layout())


@converts("layers.GaussianDropout")
def _gaussian_dropout(layer: Any, site: Site) -> Part:
    return Part(GaussianNoise((layer.rate / (1 - layer.rate)) ** 0.5, multiply=True), site.keeps_layout())


@converts("layers.Identity")
def _identity(layer: Any, site: Site) -> Part:
    return Part(nn.Identity(), site.keeps_layout())


class LayerScale(nn.Module):
    """A learnt factor per channel, of the last dimension."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.gamma


@converts("applications.LayerScale")
def _layer_scale(layer: Any, site: Site) -> Part:
    return Part(LayerScale(int(layer.gamma.shape[0])), False, [Weight(layer.gamma, "gamma")])


class ScaledSum(nn.Module):
    """A value plus a fixed share of another."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, given: Any) -> torch.Tensor:
        """Of a pair."""
        first, second = given
        y: torch.Tensor = first + second * self.scale
        return y


@converts("applications.CustomScaleLayer")
def _scaled_sum(layer: Any, site: Site) -> Part:
    return Part(ScaledSum(float(layer.scale)), site.keeps_layout())


@converts("applications.StochasticDepth")
def _stochastic_depth(layer: Any, site: Site) -> Part:
    return Part(SharedDropout(layer.drop_path_rate, (None, *(1,) * (site.rank - 1))), site.keeps_layout())


class Lookup(nn.Module):
    """One-hot rows of whole numbers."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows."""
        return F.one_hot(numbers.long(), self.size).to(self.dtype)


@converts("ops.OneHot")
def _one_hot(op: Any, site: Site) -> Part:
    if op.axis not in (-1, site.rank):
        site.refuse(f"one_hot along axis {op.axis}")
    return Part(Lookup(op.num_classes, torch_dtype(op.dtype or "float32")))
