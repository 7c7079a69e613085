"""Normalization, with Keras' statistics.

Keras keeps the variance of a batch as it is, torch multiplies it by n / (n - 1); after a step of training the running
variances differ in the third digit of a small batch. The modules here let torch write the batch's own statistics into
new tensors, and update the running ones by Keras' rule. Keras' momentum is the share that stays, torch's the share that
is new. A layer with ``trainable = False`` normalizes by its running statistics in training too, as in Keras.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


class _Statistics:
    """Batch normalization whose running variance is Keras'."""

    frozen = False

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.running_mean, self.running_var
        if not self.training or self.frozen:
            return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        count = x.numel() // x.shape[1]
        if count == 1:  # torch has no variance of one element
            mean.lerp_(x.detach().reshape(-1), self.momentum)
            variance.mul_(1 - self.momentum)
            unit = torch.ones_like(variance)
            return F.batch_norm(x - x, unit * 0, unit, self.weight, self.bias, False, 0.0, self.eps)
        of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
        y = F.batch_norm(x, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
        mean.lerp_(of_batch[0], self.momentum)
        variance.lerp_(of_batch[1] * ((count - 1) / count), self.momentum)
        return y

    def _load_from_state_dict(self: Any, state: Any, prefix: str, notes: Any, *more: Any) -> None:
        """torch takes weights without a version for those of old modules, and adds a count of batches to them."""
        super()._load_from_state_dict(state, prefix, {**notes, "version": 2}, *more)  # type: ignore[misc]


class BatchNorm1d(_Statistics, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with Keras' running variance."""


class BatchNorm2d(_Statistics, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with Keras' running variance."""


class BatchNorm3d(_Statistics, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with Keras' running variance."""


def _affine(module: Any, gamma: Any, beta: Any) -> list[Weight]:
    """Give a module without weights those that the layer has."""
    weights = []
    for variable, name in ((gamma, "weight"), (beta, "bias")):
        if variable is not None:
            setattr(module, name, nn.Parameter(torch.empty(tuple(int(n) for n in variable.shape))))
            weights.append(Weight(variable, name))
    return weights


@converts("layers.BatchNormalization")
def _batch_norm(layer: Any, site: Site) -> Part:
    if getattr(layer, "renorm", False):
        site.refuse("batch renormalization", "set renorm=False")
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    axis %= site.rank
    if axis not in (1, site.rank - 1):
        site.refuse(f"it normalizes axis {axis} of {site.rank}")
    if site.rank > 5:
        site.refuse(f"its input has {site.rank} dimensions; torch's has at most 5")
    make: Any = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}[site.rank]
    channels = int(layer.moving_mean.shape[0])
    module = make(channels, eps=layer.epsilon, momentum=1 - layer.momentum, affine=False)
    del module.num_batches_tracked
    module.register_buffer("num_batches_tracked", None)
    module.frozen = not layer.trainable
    weights = _affine(module, layer.gamma, layer.beta)
    weights += [Weight(layer.moving_mean, "running_mean"), Weight(layer.moving_variance, "running_var")]
    return Part(module, axis == site.rank - 1 and site.rank > 2, weights)


class RmsNorm(nn.Module):
    """Scaling by the root of the mean of the squares, over the last dimensions."""

    weight: nn.Parameter | None

    def __init__(self, dims: int, epsilon: float) -> None:
        super().__init__()
        self.dims, self.epsilon = tuple(range(-dims, 0)), epsilon
        self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide, then scale."""
        y = x * torch.rsqrt((x * x).mean(self.dims, keepdim=True) + self.epsilon)
        return y if self.weight is None else y * self.weight


def _last_axes(axis: Any, site: Site) -> int:
    axes = sorted(a % site.rank for a in ([axis] if isinstance(axis, int) else axis))
    if axes != list(range(site.rank - len(axes), site.rank)):
        site.refuse(f"it normalizes axes {axes} of {site.rank}, not the last ones")
    return len(axes)


@converts("layers.LayerNormalization")
def _layer_norm(layer: Any, site: Site) -> Part:
    dims = _last_axes(layer.axis, site)
    if getattr(layer, "rms_scaling", False):
        site.refuse("rms_scaling", "use RMSNormalization")
    shape = layer._build_shapes_dict["input_shape"] if layer.gamma is None and layer.beta is None else None
    given = layer.gamma if layer.gamma is not None else layer.beta
    sizes = tuple(int(n) for n in (given.shape if shape is None else shape[-dims:]))
    module = nn.LayerNorm(sizes, eps=layer.epsilon, elementwise_affine=False)
    return Part(module, False, _affine(module, layer.gamma, layer.beta))


@converts("layers.RMSNormalization")
def _rms_norm(layer: Any, site: Site) -> Part:
    module = RmsNorm(_last_axes(layer.axis, site), layer.epsilon)
    module.weight = nn.Parameter(torch.empty(tuple(int(n) for n in layer.scale.shape)))
    return Part(module, False, [Weight(layer.scale, "weight")])


class UnitNorm(nn.Module):
    """Vectors of length one along some dimensions."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the length, which is taken as at least 1e-6."""
        return x * torch.rsqrt((x * x).sum(self.dims, keepdim=True).clamp(min=1e-12))


@converts("layers.UnitNormalization")
def _unit_norm(layer: Any, site: Site) -> Part:
    axis = layer.axis
    return Part(UnitNorm((axis,) if isinstance(axis, int) else tuple(axis)))


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` of values in the usual order of memory.

    On a CPU, torch's backward ends the process for channels-last memory where the input needs no gradient. It fails for
    a shift without a scale.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Copy if need be, then normalize."""
        weight: torch.Tensor | None = self.weight
        if weight is None and self.bias is not None:
            weight = torch.ones_like(self.bias)
        return F.group_norm(x.contiguous(), self.num_groups, weight, self.bias, self.eps)


@converts("layers.GroupNormalization")
def _group_norm(layer: Any, site: Site) -> Part:
    axis = layer.axis % site.rank
    if axis not in (1, site.rank - 1):
        site.refuse(f"it normalizes axis {axis} of {site.rank}")
    given = layer.gamma if layer.gamma is not None else layer.beta
    shape = layer._build_shapes_dict["input_shape"] if given is None else None
    channels = int(given.shape[0] if shape is None else shape[layer.axis])
    groups = channels if layer.groups == -1 else layer.groups
    module = GroupNorm(groups, channels, eps=layer.epsilon, affine=False)
    return Part(module, axis == site.rank - 1 and site.rank > 2, _affine(module, layer.gamma, layer.beta))


class ScaleAndShift(nn.Module):
    """A fixed scale and shift, after a conversion to floating point."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self, scale: Any, shift: Any, dtype: torch.dtype, *, channels_first: bool = False, rank: int = 0
    ) -> None:
        super().__init__()

        def constant(value: Any) -> torch.Tensor:
            tensor = torch.tensor(np.asarray(value), dtype=dtype)
            if channels_first and tensor.ndim:
                tensor = tensor.reshape(-1, *(1,) * (rank - 2))
            return tensor

        self.register_buffer("scale", constant(scale), persistent=False)
        self.register_buffer("shift", constant(shift), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply and add."""
        x = x if x.is_floating_point() else x.to(self.scale.dtype)
        return x * self.scale + self.shift


def torch_dtype(name: str) -> torch.dtype:
    """Keras' dtype as torch's."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@converts("layers.Rescaling")
def _rescaling(layer: Any, site: Site) -> Part:
    shapes = {np.asarray(layer.scale).ndim, np.asarray(layer.offset).ndim}
    if max(shapes) > 1:
        site.refuse("its scale is an array of more than one dimension")
    first = site.keeps_layout()
    dtype = torch_dtype(layer.compute_dtype)
    return Part(ScaleAndShift(layer.scale, layer.offset, dtype, channels_first=first, rank=site.rank), first)


class Standardize(nn.Module):
    """Subtract a mean and divide by a standard deviation, both of the data set."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, shape: tuple[int, ...], epsilon: float, *, invert: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.epsilon, self.invert = shape, epsilon, invert
        self.register_buffer("mean", torch.zeros(shape, dtype=dtype))
        self.register_buffer("variance", torch.ones(shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardize, or undo it."""
        x = x if x.is_floating_point() else x.to(self.mean.dtype)
        deviation = self.variance.sqrt().clamp(min=self.epsilon)
        return self.mean + x * deviation if self.invert else (x - self.mean) / deviation


@converts("layers.Normalization")
def _normalization(layer: Any, site: Site) -> Part:
    if getattr(layer, "adapt_mean", None) is not None and not layer.built:
        site.refuse("it is not adapted", "call adapt() on it first")
    import keras

    mean = np.asarray(keras.ops.convert_to_numpy(layer.mean))
    variance = np.asarray(keras.ops.convert_to_numpy(layer.variance))
    module = Standardize(mean.shape, 1e-7, invert=layer.invert, dtype=torch_dtype(layer.compute_dtype))
    module.epsilon = float(keras.config.epsilon())
    if not module.mean.is_meta:
        module.mean.copy_(torch.from_numpy(np.array(mean)))
        module.variance.copy_(torch.from_numpy(np.array(variance)))
    weights = []
    if getattr(layer, "adapt_mean", None) is not None:
        for variable, name in ((layer.adapt_mean, "adapt_mean"), (layer.adapt_variance, "adapt_variance")):
            module.register_buffer(name, torch.zeros(tuple(variable.shape)))
            weights.append(Weight(variable, name))
        module.register_buffer("count", torch.zeros((), dtype=torch.int64))
        weights.append(Weight(layer.count, "count"))
    return Part(module, False, weights)
