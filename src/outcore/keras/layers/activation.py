"""Activations: of their own, as layers, and inside other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.part import Part, Site, converts

__all__ = ["FUNCTIONS", "Function", "activation_module", "function_of", "with_activation"]


def _hard_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return F.relu6(x + 3) / 6


def _squareplus(x: torch.Tensor, b: float = 4) -> torch.Tensor:
    return (x + torch.sqrt(x * x + b)) / 2


def _sparse_plus(x: torch.Tensor) -> torch.Tensor:
    middle = 0.25 * (x + 1) ** 2
    return torch.where(x <= -1, torch.zeros_like(x), torch.where(x < 1, middle, x))


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "exponential": torch.exp,
    "gelu": lambda x, approximate=False: F.gelu(x, approximate="tanh" if approximate else "none"),
    "glu": lambda x, axis=-1: F.glu(x, axis),
    "hard_shrink": lambda x, threshold=0.5: F.hardshrink(x, threshold),
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": lambda x: x * _hard_sigmoid(x),
    "hard_tanh": F.hardtanh,
    "leaky_relu": lambda x, negative_slope=0.2: F.leaky_relu(x, negative_slope),
    "linear": lambda x: x,
    "log_sigmoid": F.logsigmoid,
    "log_softmax": lambda x, axis=-1: F.log_softmax(x, axis),
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "soft_shrink": lambda x, threshold=0.5: F.softshrink(x, threshold),
    "softmax": lambda x, axis=-1: F.softmax(x, axis),
    "softplus": lambda x: F.softplus(x, threshold=40.0),
    "softsign": F.softsign,
    "sparse_plus": _sparse_plus,
    "squareplus": _squareplus,
    "tanh": torch.tanh,
    "tanh_shrink": F.tanhshrink,
    "threshold": lambda x, threshold, default_value: F.threshold(x, threshold, default_value),
}
"""Keras' activations by name, with the settings they may be called with."""

_ALONG_AXIS = {"softmax", "log_softmax", "glu"}
_MODULES: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
}


class Function(nn.Module):
    """An activation that torch has no module for."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.name, self.settings = name, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The function, element by element or along one axis."""
        return FUNCTIONS[self.name](x, **self.settings)

    def extra_repr(self) -> str:
        """Its name and its settings."""
        return ", ".join([self.name, *(f"{k}={v}" for k, v in self.settings.items())])


def function_of(activation: Any, site: Site) -> str:
    """The name of one of Keras' own activation functions."""
    name = getattr(activation, "__name__", type(activation).__name__)
    module = getattr(activation, "__module__", "")
    name = {"swish": "silu", "hard_swish": "hard_silu"}.get(name, name)
    if name not in FUNCTIONS or not module.startswith("keras."):
        site.refuse(f"its activation {name!r} is not one of Keras'")
    return name


def activation_module(name: str, *, channels_first: bool) -> nn.Module:
    """The module of an activation with its usual settings."""
    if name in _MODULES:
        return _MODULES[name]()
    if name in _ALONG_AXIS:
        return Function(name, axis=1 if channels_first else -1)
    return Function(name)


def with_activation(part: Part, activation: Any, site: Site) -> Part:
    """A part followed by the activation that its layer ends in."""
    if activation is None:
        return part
    if type(activation).__name__ in CLASSES:  # a layer given as activation
        made = _own_layer(activation, Site(site.path, site.kind, site.ranks, part.first))
        if made.weights:
            site.refuse("its activation has weights of its own", "make the activation a layer after it")
        module = made.module
    else:
        name = function_of(activation, site)
        if name == "linear":
            return part
        module = activation_module(name, channels_first=part.first)
    whole = nn.Sequential()
    kind = type(part.module).__name__
    inner = "linear" if kind == "Linear" else "conv" if "Conv" in kind else "layer"
    whole.add_module(inner, part.module)
    whole.add_module("activation", module)
    return Part(whole, part.first, [weight.within(inner) for weight in part.weights])


@converts("layers.Activation")
def _activation(layer: Any, site: Site) -> Part:
    first = site.keeps_layout()
    activation = layer.activation
    if type(activation).__name__ in CLASSES:
        return _own_layer(activation, site)
    return Part(activation_module(function_of(activation, site), channels_first=first), first)


class BoundedRelu(nn.Module):
    """Keras' ``ReLU`` with a slope, a threshold and a bound."""

    def __init__(self, slope: float, threshold: float, bound: float | None) -> None:
        super().__init__()
        self.slope, self.threshold, self.bound = slope, threshold, bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Slope below the threshold, the bound above."""
        if self.threshold:
            above = torch.where(x > self.threshold, x, torch.zeros_like(x))
            below = self.slope * F.relu(self.threshold - x)
        else:
            above, below = F.relu(x), self.slope * F.relu(-x)
        if self.bound is not None:
            above = above.clamp(max=self.bound)
        return above - below if self.slope else above


def _own_layer(layer: Any, site: Site) -> Part:
    return CLASSES[type(layer).__name__](layer, site)


@converts("layers.ReLU")
def _relu(layer: Any, site: Site) -> Part:
    slope, threshold = float(layer.negative_slope or 0), float(layer.threshold or 0)
    bound = None if layer.max_value is None else float(layer.max_value)
    module: nn.Module = BoundedRelu(slope, threshold, bound)
    if not threshold and bound is None:
        module = nn.LeakyReLU(slope) if slope else nn.ReLU()
    elif not threshold and bound == 6 and not slope:
        module = nn.ReLU6()
    return Part(module, site.keeps_layout())


@converts("layers.LeakyReLU")
def _leaky_relu(layer: Any, site: Site) -> Part:
    return Part(nn.LeakyReLU(float(layer.negative_slope)), site.keeps_layout())


@converts("layers.ELU")
def _elu(layer: Any, site: Site) -> Part:
    return Part(nn.ELU(float(layer.alpha)), site.keeps_layout())


@converts("layers.Softmax")
def _softmax(layer: Any, site: Site) -> Part:
    if not isinstance(layer.axis, int):
        site.refuse(f"softmax over axes {layer.axis}")
    first = site.keeps_layout() and layer.axis in (-1, site.rank - 1)
    return Part(nn.Softmax(1 if first else layer.axis), first)


class ChannelPRelu(nn.Module):
    """A rectifier with a learnt slope, which may be one per element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The slope times what is negative."""
        return F.relu(x) - self.alpha * F.relu(-x)


@converts("layers.PReLU")
def _prelu(layer: Any, site: Site) -> Part:
    if not layer.built:  # as an activation it gets its weights in the first call with numbers
        site.refuse("its activation PReLU has no weights yet", "make the activation a layer after it")
    shape = tuple(int(n) for n in layer.alpha.shape)
    return Part(ChannelPRelu(shape), False, [Weight(layer.alpha, "alpha")])


CLASSES = {"ReLU": _relu, "LeakyReLU": _leaky_relu, "ELU": _elu, "Softmax": _softmax, "PReLU": _prelu}
"""Layers that are often given as an activation."""
