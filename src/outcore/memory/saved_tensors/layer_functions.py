"""The most common layers as the functions they compute.

To run a layer again as it was, a copy of it is made, with its attributes and the memory of its parameters. For the
layers that networks have most of, that is a function of a few tensors and constants, which is held in a fraction of the
time. Only torch's own classes are known here, with their parameters where torch puts them; anything else (a subclass, a
parametrized weight, another padding) is copied as a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LayerFunction = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]
"""A function, the parameters that follow the layer's input, and the constants that follow these."""


def function_of(module: nn.Module) -> LayerFunction | None:
    """What a layer computes, as its attributes are now; none if only the layer itself knows.

    >>> function, parameters, constants = function_of(nn.Conv2d(3, 8, 3))
    >>> function.__name__, [list(p.shape) for p in parameters], constants
    ('conv2d', [[8, 3, 3, 3], [8]], ((1, 1), (0, 0), (1, 1), 1))
    """
    kind = type(module)
    known = _FUNCTIONS.get(kind)
    if known is None or "forward" in module.__dict__ or kind.forward is not _FORWARDS[kind]:
        return None  # somebody has put another forward in its place
    try:
        return known(module.__dict__)
    except KeyError:  # an attribute that is not where torch puts it
        return None


def _linear(own: Mapping[str, Any]) -> LayerFunction:
    parameters = own["_parameters"]
    return F.linear, (parameters["weight"], parameters["bias"]), ()


def _convolution(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], LayerFunction | None]:
    def found(own: Mapping[str, Any]) -> LayerFunction | None:
        if own["padding_mode"] != "zeros":
            return None
        parameters = own["_parameters"]
        constants = own["stride"], own["padding"], own["dilation"], own["groups"]
        return function, (parameters["weight"], parameters["bias"]), constants

    return found


def _relu(own: Mapping[str, Any]) -> LayerFunction:
    return (torch.relu_ if own["inplace"] else torch.relu), (), ()


def _layer_norm(own: Mapping[str, Any]) -> LayerFunction:
    parameters = own["_parameters"]

    def layer_norm(x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    return layer_norm, (parameters["weight"], parameters["bias"]), (own["normalized_shape"], own["eps"])


def _dropout(own: Mapping[str, Any]) -> LayerFunction:
    return F.dropout, (), (own["p"], own["training"], own["inplace"])


_FUNCTIONS: dict[type, Callable[[Mapping[str, Any]], LayerFunction | None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution(F.conv1d),
    nn.Conv2d: _convolution(F.conv2d),
    nn.Conv3d: _convolution(F.conv3d),
    nn.ReLU: _relu,
    nn.LayerNorm: _layer_norm,
    nn.Dropout: _dropout,
}
_FORWARDS: dict[type, Any] = {kind: kind.__dict__.get("forward", kind.forward) for kind in _FUNCTIONS}  # type: ignore[attr-defined]
