"""Convolutions, with TensorFlow's padding.

``padding="same"`` gives ``ceil(size / stride)`` positions; what has to be added for that depends on the size of the
input, and an odd number of it goes to the end. Where both ends get the same and the stride is one, the module is
torch's own with its own padding; otherwise it pads first. A transposed convolution is the gradient of such a
convolution, so it crops what the convolution would have padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.layers.activation import with_activation
from outcore.keras.part import Part, Site, converts

__all__ = ["pad_same", "same_padding"]


def same_padding(size: int, window: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """What TensorFlow adds before and after a dimension.

    >>> same_padding(224, 3, 2), same_padding(225, 3, 2), same_padding(7, 4, 1)
    ((0, 1), (1, 1), (1, 2))
    """
    total = max(0, (-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size)
    return total // 2, total - total // 2


def pad_same(
    x: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int] | None = None,
    value: float = 0.0,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """An image padded as far as torch's symmetric padding cannot, and the symmetric padding left to do."""
    sizes = x.shape[2:]
    pads = [
        same_padding(n, w, s, d)
        for n, w, s, d in zip(sizes, window, stride, dilation or [1] * len(window), strict=True)
    ]
    if all(before == after for before, after in pads):
        return x, tuple(before for before, _ in pads)
    flat = [amount for pair in reversed(pads) for amount in pair]
    return F.pad(x, flat, value=value), (0,) * len(pads)


class _Same:
    """A convolution of torch that pads as TensorFlow does."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, padding = pad_same(x, self.kernel_size, self.stride, self.dilation)
        function = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
        return function(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class SameConv1d(_Same, nn.Conv1d):
    """`nn.Conv1d` with TensorFlow's "same" padding."""


class SameConv2d(_Same, nn.Conv2d):
    """`nn.Conv2d` with TensorFlow's "same" padding."""


class SameConv3d(_Same, nn.Conv3d):
    """`nn.Conv3d` with TensorFlow's "same" padding."""


class CausalConv1d(nn.Conv1d):
    """A convolution over time that sees no later step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad before the first step alone."""
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class _Pointwise:
    """A convolution of single pixels with gaps between them, as a choice of pixels and a convolution without gaps."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rank = x.ndim - 2
        pool, function = ((F.avg_pool1d, F.conv1d), (F.avg_pool2d, F.conv2d), (F.avg_pool3d, F.conv3d))[rank - 1]
        x = pool(x, (1,) * rank, self.stride)
        return function(x, self.weight, self.bias, groups=self.groups)


class PointwiseConv1d(_Pointwise, nn.Conv1d):
    """`nn.Conv1d` with a kernel of one step, and gaps."""


class PointwiseConv2d(_Pointwise, nn.Conv2d):
    """`nn.Conv2d` with a kernel of one pixel, and gaps."""


class PointwiseConv3d(_Pointwise, nn.Conv3d):
    """`nn.Conv3d` with a kernel of one voxel, and gaps."""


_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POINTWISE = (PointwiseConv1d, PointwiseConv2d, PointwiseConv3d)
_FEW_CHANNELS = 16
"""With fewer and channels last, oneDNN's gradient of a strided kernel of one pixel writes past its memory on a CPU."""
_SAME = (SameConv1d, SameConv2d, SameConv3d)


def convolution(
    rank: int, channels: int, filters: int, layer: Any, site: Site, *, groups: int, bias: bool, window: Sequence[int]
) -> nn.Module:
    """The module of a convolution; its weights are not set."""
    dilation, stride, window = tuple(layer.dilation_rate), tuple(layer.strides), tuple(window)
    make: type[nn.Module]
    padding: tuple[int, ...] | int = 0
    single = all(w == 1 for w in window) and any(s > 1 for s in stride) and layer.padding in ("valid", "same")
    if single and channels // groups < _FEW_CHANNELS:
        make = _POINTWISE[rank - 1]
    elif layer.padding == "valid":
        make = _PLAIN[rank - 1]
    elif layer.padding == "causal":
        make = CausalConv1d
    elif layer.padding == "same":
        symmetric = all(s == 1 and (w - 1) * d % 2 == 0 for s, w, d in zip(stride, window, dilation, strict=True))
        make = _PLAIN[rank - 1] if symmetric else _SAME[rank - 1]
        if symmetric:
            padding = tuple((w - 1) * d // 2 for w, d in zip(window, dilation, strict=True))
    else:
        site.refuse(f"padding={layer.padding!r}")
    return make(channels, filters, window, stride, padding, dilation, groups, bias)  # type: ignore[arg-type]


def _first(layer: Any) -> bool:
    return bool(layer.data_format == "channels_last")


@converts("layers.Conv1D", "layers.Conv2D", "layers.Conv3D")
def _conv(layer: Any, site: Site) -> Part:
    rank = layer.rank
    kernel = layer._kernel if hasattr(layer, "_kernel") else layer.kernel
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        site.refuse("it has low-rank or quantized weights", "merge or remove them first")
    *window, channels, filters = (int(n) for n in kernel.shape)
    module = convolution(
        rank,
        channels * layer.groups,
        filters,
        layer,
        site,
        groups=layer.groups,
        bias=layer.use_bias,
        window=window,
    )
    weights = [Weight(kernel, "weight", permute=(rank + 1, rank, *range(rank)))]
    if layer.use_bias:
        weights.append(Weight(layer.bias, "bias"))
    return with_activation(Part(module, _first(layer), weights), layer.activation, site)


def _depthwise(layer: Any, kernel: Any, site: Site, *, bias: bool) -> tuple[nn.Module, Weight]:
    rank = layer.rank
    *window, channels, multiplier = (int(n) for n in kernel.shape)
    module = convolution(rank, channels, channels * multiplier, layer, site, groups=channels, bias=bias, window=window)
    weight = Weight(kernel, "weight", permute=(rank, rank + 1, *range(rank)), merge=(channels * multiplier, 1, *window))
    return module, weight


@converts("layers.DepthwiseConv1D", "layers.DepthwiseConv2D")
def _depthwise_conv(layer: Any, site: Site) -> Part:
    module, weight = _depthwise(layer, layer.kernel, site, bias=layer.use_bias)
    weights = [weight] + ([Weight(layer.bias, "bias")] if layer.use_bias else [])
    return with_activation(Part(module, _first(layer), weights), layer.activation, site)


@converts("layers.SeparableConv1D", "layers.SeparableConv2D")
def _separable_conv(layer: Any, site: Site) -> Part:
    rank = layer.rank
    depthwise, weight = _depthwise(layer, layer.depthwise_kernel, site, bias=False)
    *_, channels, filters = (int(n) for n in layer.pointwise_kernel.shape)
    pointwise = _PLAIN[rank - 1](channels, filters, 1, bias=layer.use_bias)
    module = nn.Sequential()
    module.add_module("depthwise", depthwise)
    module.add_module("pointwise", pointwise)
    weights = [
        weight.within("depthwise"),
        Weight(layer.pointwise_kernel, "pointwise.weight", permute=(rank + 1, rank, *range(rank))),
    ]
    if layer.use_bias:
        weights.append(Weight(layer.bias, "pointwise.bias"))
    return with_activation(Part(module, _first(layer), weights), layer.activation, site)


class _Transposed:
    """A transposed convolution of torch that crops and pads as TensorFlow does."""

    extra: tuple[int, ...]

    def forward(self: Any, x: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.ndim - 3]
        y = function(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )
        if any(after for after in self.extra):
            for dim, after in enumerate(self.extra):
                y = y.narrow(dim + 2, 0, y.shape[dim + 2] - after) if after else y
        return y


class CroppedConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with TensorFlow's output size."""


class CroppedConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with TensorFlow's output size."""


class CroppedConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with TensorFlow's output size."""


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CROPPED = (CroppedConvTranspose1d, CroppedConvTranspose2d, CroppedConvTranspose3d)


@converts("layers.Conv1DTranspose", "layers.Conv2DTranspose", "layers.Conv3DTranspose")
def _conv_transpose(layer: Any, site: Site) -> Part:
    rank = layer.rank
    *window, filters, channels = (int(n) for n in layer.kernel.shape)
    if layer.output_padding is not None:
        site.refuse(f"output_padding={layer.output_padding}", "leave it out: the output is then input * stride")
    paddings, outputs, extras = [], [], []
    for w, s, d in zip(window, layer.strides, layer.dilation_rate, strict=True):
        reach = (w - 1) * d + 1
        padding = max(0, reach - s) // 2 if layer.padding == "same" else 0
        wanted = s if layer.padding == "same" else max(reach, s)  # size of the output where the input has size one
        surplus = reach - 2 * padding - wanted
        paddings.append(padding)
        outputs.append(max(0, -surplus))
        extras.append(max(0, surplus))
    make: Any = _CROPPED[rank - 1] if any(extras) else _TRANSPOSED[rank - 1]
    module = make(
        channels,
        filters,
        tuple(window),
        tuple(layer.strides),
        tuple(paddings),
        tuple(outputs),
        1,
        layer.use_bias,
        tuple(layer.dilation_rate),
    )
    if any(extras):
        module.extra = tuple(extras)
    weights = [Weight(layer.kernel, "weight", permute=(rank + 1, rank, *range(rank)))]
    if layer.use_bias:
        weights.append(Weight(layer.bias, "bias"))
    return with_activation(Part(module, _first(layer), weights), layer.activation, site)
