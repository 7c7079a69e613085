"""How functions fuse: ``torch`` and ``torch.nn.functional`` by name.

A rule takes a `FusedCall` and returns its result for all members, or NotImplemented where it does not apply.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.nn.functional as F

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import attention as attend
from outcore.fusion.rules import elementwise
from outcore.fusion.rules.convolution import MemberConvolution
from outcore.fusion.rules.loss import cross_entropy
from outcore.fusion.rules.matmul import linear
from outcore.fusion.rules.max_min import extreme
from outcore.fusion.rules.normalisation import batch_norm, group_norm, last_dims_norm
from outcore.graph.naming import function_name

__all__ = ["embedding", "function_rule"]

_CHANNEL_POOLS = frozenset("max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool".split())


def function_rule(name: str) -> Callable[[FusedCall], Any] | None:
    """The rule of a function; None if it has none."""
    return _FUNCTIONS.get(name) or _by_family(name)


def _bound(function: Callable[..., Any]) -> Callable[[FusedCall], Any]:
    """A rule from a function of the arguments: ``function(**arguments by torch's own names)``."""

    def rule(call: FusedCall) -> Any:
        names = _parameters(call.target)
        made = function(**(dict(zip(names, call.args, strict=False)) | call.kwargs))
        if made is not NotImplemented:
            call.note("fused")
        return made

    return rule


@cache
def _parameters(target: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return _BUILTIN[function_name(target)]


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_T = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_BUILTIN: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    **{f"conv{d}d": _CONV for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _CONV_T for d in (1, 2, 3)},
}


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return linear(input, weight, bias)


def _conv(dims: int) -> Callable[..., Any]:
    def function(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        return MemberConvolution.of(dims, stride, padding, dilation, groups).fused(input, weight, bias)

    return function


def _conv_transpose(dims: int) -> Callable[..., Any]:
    def function(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return MemberConvolution.of(dims, stride, padding, dilation, groups, output_padding).fused(input, weight, bias)

    return function


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return last_dims_norm(F.layer_norm, input, normalized_shape, weight, bias, eps)


def _group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return group_norm(input, num_groups, weight, bias, eps)


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding`` for all members; NotImplemented where the table is written or the gradient is scaled."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return attend.embedding(input, weight, padding_idx)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    return attend.attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)


def _attend(call: FusedCall) -> Any:
    """Attention; all members draw their dropout together, unless each has a stream of its own."""
    dropout_p = call.args[4] if len(call.args) > 4 else call.kwargs.get("dropout_p", 0.0)
    if dropout_p and call.randomness.per_member:
        return call.one_by_one()
    return _bound(_attention)(call)


_FUNCTIONS: dict[str, Callable[[FusedCall], Any]] = {
    "linear": _bound(_linear),
    **{f"conv{d}d": _bound(_conv(d)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _bound(_conv_transpose(d)) for d in (1, 2, 3)},
    "batch_norm": _bound(_batch_norm),
    "layer_norm": _bound(_layer_norm),
    "group_norm": _bound(_group_norm),
    "embedding": _bound(embedding),
    "cross_entropy": _bound(cross_entropy),
    "scaled_dot_product_attention": _attend,
    "max": extreme,
    "min": extreme,
    "view": elementwise.reshape,
    "reshape": elementwise.reshape,
    "contiguous": elementwise.contiguous,
    **dict.fromkeys(elementwise.UNARY, elementwise.unary),
    **dict.fromkeys(elementwise.BINARY, elementwise.binary),
}


def _by_family(name: str) -> Callable[[FusedCall], Any] | None:
    """Pools and resizing: ``max_pool2d``, ``adaptive_avg_pool1d``, ``interpolate``."""
    family, dims = name[:-2], name[-2:-1]
    if family in _CHANNEL_POOLS and dims in "123":
        return lambda call: elementwise.per_channel(call, int(dims))
    if name in ("interpolate", "upsample"):
        return lambda call: (
            elementwise.per_channel(call, call.args[0].rank - 2)
            if isinstance(call.args[0], Stacked)
            else NotImplemented
        )
    return None
