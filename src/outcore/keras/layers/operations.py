"""Keras' operations in a functional model: ``x * y``, ``keras.ops.mean(x, axis=1)``, ``x[:, 0]``.

An operation on single elements runs in whatever layout its inputs have, as long as all of one rank have the same; every
other one sees values as Keras has them. Settings are plain data, so that a twin can be copied and sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.layers.activation import FUNCTIONS
from outcore.keras.layers.normalization import torch_dtype
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


def _dims(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, (list, tuple)) else axis


def _tensor(x: Any, like: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=like.dtype, device=like.device)


def _pair(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(a: Any, b: Any) -> torch.Tensor:
        like = a if isinstance(a, torch.Tensor) else b
        return function(_tensor(a, like), _tensor(b, like))

    return run


ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "Absolute": torch.abs,
    "Abs": torch.abs,
    "Add": lambda a, b: a + b,
    "Arctan": torch.atan,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Divide": lambda a, b: a / b,
    "TrueDivide": lambda a, b: a / b,
    "Equal": lambda a, b: a == b,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Greater": lambda a, b: a > b,
    "GreaterEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessEqual": lambda a, b: a <= b,
    "Log": torch.log,
    "Log1p": torch.log1p,
    "LogicalAnd": torch.logical_and,
    "LogicalNot": torch.logical_not,
    "LogicalOr": torch.logical_or,
    "Maximum": _pair(torch.maximum),
    "Minimum": _pair(torch.minimum),
    "Multiply": lambda a, b: a * b,
    "Negative": lambda a: -a,
    "NotEqual": lambda a, b: a != b,
    "OnesLike": lambda a: torch.ones_like(a),
    "Power": lambda a, b: a**b,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "StopGradient": lambda a: a.detach(),
    "Subtract": lambda a, b: a - b,
    "ZerosLike": lambda a: torch.zeros_like(a),
}
_ACTIVATIONS = {
    "Relu": ("relu", ()),
    "Relu6": ("relu6", ()),
    "Sigmoid": ("sigmoid", ()),
    "Softplus": ("softplus", ()),
    "Softsign": ("softsign", ()),
    "SoftShrink": ("soft_shrink", ("threshold",)),
    "SparsePlus": ("sparse_plus", ()),
    "Silu": ("silu", ()),
    "Squareplus": ("squareplus", ("b",)),
    "LogSigmoid": ("log_sigmoid", ()),
    "LeakyRelu": ("leaky_relu", ("negative_slope",)),
    "HardSigmoid": ("hard_sigmoid", ()),
    "HardSilu": ("hard_silu", ()),
    "Elu": ("elu", ("alpha",)),
    "Selu": ("selu", ()),
    "Gelu": ("gelu", ("approximate",)),
    "Celu": ("celu", ("alpha",)),
    "TanhShrink": ("tanh_shrink", ()),
    "HardTanh": ("hard_tanh", ()),
    "HardShrink": ("hard_shrink", ("threshold",)),
    "Tanh": ("tanh", ()),
    "Softmax": ("softmax", ("axis",)),
    "LogSoftmax": ("log_softmax", ("axis",)),
}


def _reduced(name: str) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, axis: Any, keepdims: bool) -> torch.Tensor:
        dims = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if name == "mean":
            return x.mean(dims, keepdim=keepdims)
        if name == "sum":
            return x.sum(dims, keepdim=keepdims)
        if name in ("var", "std"):
            variance = x.var(dims, unbiased=False, keepdim=keepdims)
            return variance.sqrt() if name == "std" else variance
        if name == "prod":
            for dim in sorted((d % x.ndim for d in dims), reverse=True):
                x = x.prod(dim, keepdim=keepdims)
            return x
        return x.amax(dims, keepdim=keepdims) if name == "max" else x.amin(dims, keepdim=keepdims)

    return run


def _pad(x: torch.Tensor, pad_width: Any, mode: str, constant_values: Any = None) -> torch.Tensor:
    pairs = list(pad_width) * (x.ndim if len(pad_width) == 1 else 1)
    flat = [int(amount) for pair in reversed(pairs) for amount in pair]
    if mode == "constant":
        return F.pad(x, flat, value=constant_values or 0)
    while flat and not flat[-1] and not flat[-2]:
        flat = flat[:-2]
    lead = x.ndim - len(flat) // 2
    y = F.pad(x.reshape(1, -1, *x.shape[lead:]), flat, mode=mode)
    return y.reshape(*x.shape[:lead], *y.shape[2:])


def _split(x: torch.Tensor, indices_or_sections: Any, axis: int) -> list[torch.Tensor]:
    if isinstance(indices_or_sections, int):
        return list(x.tensor_split(indices_or_sections, axis))
    return list(x.tensor_split(list(indices_or_sections), axis))


def _take(x: torch.Tensor, indices: Any, axis: int | None) -> torch.Tensor:
    if axis is None:
        x, axis = x.reshape(-1), 0
    found = torch.as_tensor(indices, device=x.device).long()
    axis %= x.ndim
    y = x.index_select(axis, found.reshape(-1))
    return y.reshape(*x.shape[:axis], *found.shape, *x.shape[axis + 1 :])


def _reshape(x: torch.Tensor, newshape: Any) -> torch.Tensor:
    shape = [newshape] if isinstance(newshape, int) else list(newshape)
    shape = [-1 if n is None else n for n in shape]
    if shape.count(-1) > 1 and shape[0] == -1:
        shape[0] = x.shape[0]
    return x.reshape(shape)


def _expand(x: torch.Tensor, axis: Any) -> torch.Tensor:
    for dim in sorted([axis] if isinstance(axis, int) else axis):
        x = x.unsqueeze(dim)
    return x


def _repeat(x: torch.Tensor, repeats: int, axis: int | None) -> torch.Tensor:
    return x.repeat_interleave(repeats, dim=axis)


def _where(condition: Any, x1: Any, x2: Any) -> torch.Tensor:
    like = x1 if isinstance(x1, torch.Tensor) else x2
    return torch.where(condition, _tensor(x1, like), _tensor(x2, like))


def _item(x: torch.Tensor, key: Any) -> torch.Tensor:
    return x[tuple(key) if isinstance(key, list) else key]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


ORDERED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{
        name: (_reduced(how), ("axis", "keepdims"))
        for name, how in {
            "Mean": "mean",
            "Sum": "sum",
            "Max": "max",
            "Min": "min",
            "Amax": "max",
            "Amin": "min",
            "Var": "var",
            "Std": "std",
            "Prod": "prod",
        }.items()
    },
    "Argmax": (lambda x, axis, keepdims: x.argmax(axis, keepdim=keepdims).to(torch.int32), ("axis", "keepdims")),
    "Argmin": (lambda x, axis, keepdims: x.argmin(axis, keepdim=keepdims).to(torch.int32), ("axis", "keepdims")),
    "BroadcastTo": (lambda x, shape: x.expand(tuple(-1 if n is None else n for n in shape)), ("shape",)),
    "Einsum": (lambda *values, subscripts: torch.einsum(subscripts, *values), ("subscripts",)),
    "ExpandDims": (_expand, ("axis",)),
    "Flip": (lambda x, axis: x.flip([axis] if isinstance(axis, int) else axis or list(range(x.ndim))), ("axis",)),
    "GetItem": (_item, ()),
    "Glu": (FUNCTIONS["glu"], ("axis",)),
    "Logsumexp": (
        lambda x, axis, keepdims: torch.logsumexp(x, list(range(x.ndim)) if axis is None else axis, keepdim=keepdims),
        ("axis", "keepdims"),
    ),
    "Matmul": (_matmul, ()),
    "Moveaxis": (
        lambda x, source, destination: x.movedim(_dims(source), _dims(destination)),
        ("source", "destination"),
    ),
    "Pad": (_pad, ("pad_width", "mode")),
    "Repeat": (_repeat, ("repeats", "axis")),
    "Reshape": (_reshape, ("newshape",)),
    "Split": (_split, ("indices_or_sections", "axis")),
    "Squeeze": (lambda x, axis: x.squeeze() if axis is None else x.squeeze(_dims(axis)), ("axis",)),
    "Stack": (lambda values, axis: torch.stack(list(values), axis), ("axis",)),
    "Swapaxes": (lambda x, axis1, axis2: x.swapaxes(axis1, axis2), ("axis1", "axis2")),
    "Take": (_take, ("axis",)),
    "Tile": (
        lambda x, repeats: x.repeat(repeats) if isinstance(repeats, int) else torch.tile(x, repeats),
        ("repeats",),
    ),
    "Transpose": (lambda x, axes: x.permute(tuple(axes or reversed(range(x.ndim)))), ("axes",)),
    "Where": (_where, ()),
}
"""Operations that see values as Keras has them, and the settings that each has."""


class Operation(nn.Module):
    """One of Keras' operations."""

    def __init__(self, name: str, settings: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.name, self.settings = name, settings or {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same in torch."""
        if self.name in ELEMENTWISE:
            return ELEMENTWISE[self.name](*args, **kwargs)
        if self.name in _ACTIVATIONS:
            return FUNCTIONS[_ACTIVATIONS[self.name][0]](*args, **kwargs, **self.settings)
        return ORDERED[self.name][0](*args, **kwargs, **self.settings)

    def extra_repr(self) -> str:
        """Its name and settings."""
        return ", ".join([self.name, *(f"{k}={v}" for k, v in self.settings.items())])


@converts(*(f"ops.{name}" for name in ELEMENTWISE))
def _elementwise(op: Any, site: Site) -> Part:
    return Part(Operation(type(op).__name__), site.keeps_layout())


@converts(*(f"ops.{name}" for name in _ACTIVATIONS))
def _activation(op: Any, site: Site) -> Part:
    name = type(op).__name__
    settings = {setting: getattr(op, setting) for setting in _ACTIVATIONS[name][1]}
    return Part(Operation(name, settings), site.keeps_layout() and "axis" not in settings)


@converts(*(f"ops.{name}" for name in ORDERED))
def _ordered(op: Any, site: Site) -> Part:
    name = type(op).__name__
    if name == "Pad" and op.mode not in ("constant", "reflect"):
        site.refuse(f"padding with mode={op.mode!r}", "constant and reflect are known")
    return Part(Operation(name, {setting: getattr(op, setting) for setting in ORDERED[name][1]}))


class Clip(nn.Module):
    """Values between two bounds."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__()
        self.least, self.most = least, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Clamp."""
        return x.clamp(self.least, self.most)


@converts("ops.Clip")
def _clip(op: Any, site: Site) -> Part:
    return Part(Clip(op.x_min, op.x_max), site.keeps_layout())


class Cast(nn.Module):
    """Another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convert."""
        return x.to(self.dtype)


@converts("ops.Cast", "ops.ConvertToTensor")
def _cast(op: Any, site: Site) -> Part:
    if op.dtype is None:
        return Part(nn.Identity(), site.keeps_layout())
    return Part(Cast(torch_dtype(op.dtype)), site.keeps_layout())
