"""How functions fuse: ``torch`` and ``torch.nn.functional`` by name.

A rule takes a `FusedCall` and returns its result for all members, or NotImplemented where it does not apply.

Largest and smallest elements along a dimension have a gradient of our own. torch's writes the gradient into a tensor of
its own layout. A stacked value lies in memory as the operation before left it (channels last after a 1x1 convolution),
so the gradient of every operation before would be read in one order and written in another; PointNet, whose largest
values go through such a maximum, spent a third of its memory traffic on it. Here the gradient is laid out as the value
was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import attention as attend
from outcore.fusion.rules import elementwise
from outcore.fusion.rules.convolution import MemberConvolution
from outcore.fusion.rules.loss import cross_entropy
from outcore.fusion.rules.matmul import linear
from outcore.fusion.rules.normalisation import batch_norm, group_norm, layer_norm, rms_norm
from outcore.graph.naming import function_name
from outcore.graph.strides import is_dense
from outcore.ops.registry import Facet, find, kinds, spatial_dims
from outcore.ops.signature import SIGNATURES

_BROADCAST = """floor_divide pow remainder fmod maximum minimum atan2 logaddexp eq ne lt le gt ge logical_and logical_or
and or xor"""
"""Functions that broadcast several tensors, beside sums, products and selections."""
_POINTWISE = "activation, arithmetic, comparison"

FUNCTION_RULES: Facet[Callable[[FusedCall], Any]] = Facet("fused function", "how its function runs for all members")


def function_rule(name: str) -> Callable[[FusedCall], Any] | None:
    """The rule of a function that writes nothing; None if it has none."""
    op = find(name)
    writes = op is not None and name in op.in_place and name != op.name
    return None if writes else FUNCTION_RULES.find(name)


def _bound(function: Callable[..., Any]) -> Callable[[FusedCall], Any]:
    """A rule from a function of the arguments: ``function(**arguments by torch's own names)``."""

    def rule(call: FusedCall) -> Any:
        signature = SIGNATURES.find(function_name(call.target))
        assert signature is not None
        made = function(**signature.bound(call.args, call.kwargs))
        if made is not NotImplemented:
            call.note("fused")
        return made

    return rule


def _conv(dims: int) -> Callable[..., Any]:
    def function(
        input: Any,
        weight: Any,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        output_padding: Any = None,
    ) -> Any:
        convolution = MemberConvolution.of(dims, stride, padding, dilation, groups, output_padding)
        return convolution.fused(input, weight, bias)

    return function


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Any:
    """``F.embedding`` for all members; NotImplemented where the table is written or the gradient is scaled."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    return attend.embedding(input, weight, padding_idx)


def _attend(call: FusedCall) -> Any:
    """Attention; all members draw their dropout together, unless each has a stream of its own."""
    dropout_p = call.args[4] if len(call.args) > 4 else call.kwargs.get("dropout_p", 0.0)
    if dropout_p and call.randomness.per_member:
        return call.one_by_one()
    return _bound(attend.attention)(call)


def _channel_pool(call: FusedCall) -> Any:
    return elementwise.per_channel(call, spatial_dims(function_name(call.target)))


def _resize(call: FusedCall) -> Any:
    x = call.args[0]
    return elementwise.per_channel(call, x.rank - 2) if isinstance(x, Stacked) else NotImplemented


def extreme(call: FusedCall) -> Any:
    """``max`` and ``min`` of one tensor along one dimension; NotImplemented for their other forms."""
    x, *rest = call.args
    named = dict(zip(("dim", "keepdim"), rest, strict=False)) | call.kwargs
    if not isinstance(x, Stacked) or type(named.get("dim")) is not int or named.keys() - {"dim", "keepdim"}:
        return NotImplemented
    dim = named["dim"] % max(1, x.rank) + 1
    if x.rank == 0:
        return NotImplemented
    call.note("fused")
    made = _Extreme.apply(x.tensor, call.target, dim, bool(named.get("keepdim", False)))  # type: ignore[no-untyped-call]
    return tuple(Stacked(part) for part in made)


class _Extreme(torch.autograd.Function):
    """Values and where they were; the gradient goes there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any, dim: int, keepdim: bool) -> tuple[torch.Tensor, ...]:
        values, where = function(x, dim, keepdim)
        ctx.save_for_backward(where)
        ctx.dim, ctx.keepdim = dim, keepdim
        ctx.shape, ctx.stride = x.shape, x.stride() if is_dense(x.shape, x.stride()) else None
        ctx.mark_non_differentiable(where)
        return values, where

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (where,) = ctx.saved_tensors
        if not ctx.keepdim:
            where, grad = where.unsqueeze(ctx.dim), grad.unsqueeze(ctx.dim)
        into = grad.new_empty(ctx.shape) if ctx.stride is None else grad.new_empty_strided(ctx.shape, ctx.stride)
        return into.zero_().scatter_(ctx.dim, where, grad), None, None, None


FUNCTION_RULES.add(_bound(linear), "linear")
for _dims in (1, 2, 3):
    FUNCTION_RULES.add(_bound(_conv(_dims)), f"conv{_dims}d", f"conv_transpose{_dims}d")
FUNCTION_RULES.add(_bound(batch_norm), "batch_norm")
FUNCTION_RULES.add(_bound(layer_norm), "layer_norm")
FUNCTION_RULES.add(_bound(rms_norm), "rms_norm")
FUNCTION_RULES.add(_bound(group_norm), "group_norm")
FUNCTION_RULES.add(_bound(embedding), "embedding")
FUNCTION_RULES.add(_bound(cross_entropy), "cross_entropy")
FUNCTION_RULES.add(_attend, "scaled_dot_product_attention")
FUNCTION_RULES.add(extreme, "max", "min")
FUNCTION_RULES.add(elementwise.reshape, "view", "reshape")
FUNCTION_RULES.add(elementwise.contiguous, "contiguous")
FUNCTION_RULES.add(_channel_pool, *kinds("max pool", "average pool", "adaptive average pool", "adaptive max pool"))
FUNCTION_RULES.add(_channel_pool, *kinds("power-average pool"))
FUNCTION_RULES.add(_resize, "interpolate")
FUNCTION_RULES.add(elementwise.binary, *kinds("sum", "product", "selection"), *_BROADCAST.split())
FUNCTION_RULES.add(elementwise.unary, *(n for n in kinds(*_POINTWISE.split(", ")) if n not in _BROADCAST.split()))
FUNCTION_RULES.add(elementwise.unary, *"float double half bfloat16 long int bool".split())
FUNCTION_RULES.add(elementwise.unary, "clone", "detach", "requires_grad_", "zeros_like", "ones_like")
