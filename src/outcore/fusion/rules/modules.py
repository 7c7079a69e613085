"""How layers of torch.nn fuse, by class.

A rule takes a `FusedCall` and returns its result for all members, or NotImplemented where it does not apply: where
members' settings differ in a way the fused form cannot express, or the layer is used in an unusual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.fusion.program.call import FusedCall, has_hooks
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import elementwise, recurrent
from outcore.fusion.rules.convolution import MemberConvolution
from outcore.fusion.rules.functions import embedding
from outcore.fusion.rules.loss import cross_entropy
from outcore.fusion.rules.matmul import linear
from outcore.fusion.rules.normalisation import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from outcore.ops.registry import Facet, kinds, of_layer, spatial_dims
from outcore.ops.signature import SIGNATURES


def _of(call: FusedCall, *names: str) -> list[Any]:
    return [call.state.get(name) for name in names]


def _input(call: FusedCall) -> Any:
    return call.args[0] if call.args else call.kwargs["input"]


def _as_function(function: Callable[..., Any], *alike: str) -> Callable[[FusedCall], Any]:
    """The rule of a function for its layer, whose attributes are the function's arguments; some must be the same for
    all members."""

    def rule(call: FusedCall) -> Any:
        signature = SIGNATURES.find(type(call.module).__name__)
        assert signature is not None
        if not call.same(*alike):
            return NotImplemented
        first, *others = signature.names
        given = {name: call.state.get(name, getattr(call.module, name, None)) for name in others}
        return function(**given, **{first: _input(call)})

    return rule


def _conv_module(dims: int, transposed: bool) -> Callable[[FusedCall], Any]:
    def rule(call: FusedCall) -> Any:
        m: Any = call.module
        if not call.same("stride", "padding", "dilation", "groups", "padding_mode", "output_padding"):
            return NotImplemented
        x, padding = _input(call), m.padding
        if len(call.args) > 1 or "output_size" in call.kwargs:
            return NotImplemented
        if m.padding_mode != "zeros":
            if isinstance(x, Stacked) and x.rank != dims + 2:
                return NotImplemented
            pad = m._reversed_padding_repeated_twice
            if isinstance(x, Stacked):
                flat = F.pad(x.tensor.flatten(0, 1), pad, mode=m.padding_mode)
                x = Stacked(flat.unflatten(0, (x.members, -1)))
            else:
                x = F.pad(x, pad, mode=m.padding_mode)
            padding = 0
        extra = m.output_padding if transposed else None
        convolution = MemberConvolution.of(dims, m.stride, padding, m.dilation, m.groups, extra)
        return convolution.fused(x, *_of(call, "weight", "bias"))

    return rule


def _batch_norm_module(call: FusedCall) -> Any:
    m: Any = call.module
    mean, var, count = _of(call, "running_mean", "running_var", "num_batches_tracked")
    if m.momentum is None or not call.same("momentum", "eps", "training", "track_running_stats", "affine"):
        return NotImplemented
    if m.training and count is not None:
        count.tensor.add_(1)
    training = m.training or mean is None
    if m.training and not m.track_running_stats:
        mean = var = None
    weight, bias = _of(call, "weight", "bias")
    return batch_norm(_input(call), mean, var, weight, bias, training, m.momentum, m.eps)


def _cross_entropy_module(call: FusedCall) -> Any:
    m: Any = call.module
    if not call.same("ignore_index", "reduction", "label_smoothing") or len(call.args) != 2:
        return NotImplemented
    given = {"ignore_index": m.ignore_index, "reduction": m.reduction, "label_smoothing": m.label_smoothing}
    return cross_entropy(*call.args, call.state.get("weight"), **given)


def _instance_norm_module(call: FusedCall) -> Any:
    m: Any = call.module
    x = _input(call)
    if m.momentum is None or not isinstance(x, Stacked) or not call.same("momentum", "eps", "training"):
        return NotImplemented
    if x.rank != {"1": 3, "2": 4, "3": 5}[type(m).__name__[-2]]:
        return NotImplemented
    mean, var, weight, bias = _of(call, "running_mean", "running_var", "weight", "bias")
    return instance_norm(x, mean, var, weight, bias, m.training or not m.track_running_stats, m.momentum, m.eps)


def _activation(call: FusedCall) -> Any:
    """A module that applies one function to each element."""
    x, m = _input(call), call.module
    if not isinstance(x, Stacked) or not call.alike():
        return NotImplemented
    if getattr(m, "inplace", False):
        m.inplace = False  # type: ignore[assignment]
        try:
            return Stacked(m.forward(x.tensor))
        finally:
            m.inplace = True  # type: ignore[assignment]
    return Stacked(m.forward(x.tensor))


def _prelu(call: FusedCall) -> Any:
    """Each member has its own slope, one or one per channel."""
    x, weight = _input(call), call.state["weight"]
    if not isinstance(x, Stacked) or not isinstance(weight, Stacked) or x.rank < 2:
        return NotImplemented
    slope = weight.tensor.reshape(x.members, 1, -1, *[1] * (x.rank - 2))
    return Stacked(torch.where(x.tensor >= 0, x.tensor, slope * x.tensor))


def _identity(call: FusedCall) -> Any:
    return _input(call)


def _pool(call: FusedCall) -> Any:
    return elementwise.per_channel(call, spatial_dims(type(call.module).__name__))


def _resize(call: FusedCall) -> Any:
    x = _input(call)
    return elementwise.per_channel(call, x.rank - 2) if isinstance(x, Stacked) else NotImplemented


MODULE_RULES: Facet[Callable[[FusedCall], Any]] = Facet("fused layer", "how its layer runs for all members")
MODULE_RULES.add(_as_function(linear), "linear")
for _dims in (1, 2, 3):
    MODULE_RULES.add(_conv_module(_dims, False), f"conv{_dims}d")
    MODULE_RULES.add(_conv_module(_dims, True), f"conv_transpose{_dims}d")
MODULE_RULES.add(_batch_norm_module, "batch_norm")
MODULE_RULES.add(_instance_norm_module, "instance_norm")
MODULE_RULES.add(_as_function(group_norm, "num_groups", "eps"), "group_norm")
MODULE_RULES.add(_as_function(layer_norm, "eps"), "layer_norm")
MODULE_RULES.add(_as_function(rms_norm, "eps"), "rms_norm")
MODULE_RULES.add(_as_function(embedding, "padding_idx", "max_norm"), "embedding")
MODULE_RULES.add(_cross_entropy_module, "cross_entropy")
MODULE_RULES.add(_prelu, "prelu")
MODULE_RULES.add(_identity, "identity")
MODULE_RULES.add(_activation, *kinds("activation"))
MODULE_RULES.add(_pool, *kinds("max pool", "average pool", "adaptive average pool", "adaptive max pool"))
MODULE_RULES.add(_pool, *kinds("power-average pool"))
MODULE_RULES.add(_resize, "interpolate")
MODULE_RULES.add(recurrent.recurrent, *kinds("recurrent"))
MODULE_RULES.add(recurrent.cell, *kinds("recurrent cell"))


def module_rule(module: nn.Module) -> Callable[[FusedCall], Any] | None:
    """The rule of a layer of torch.nn; None for a class of the user, and where there is none."""
    op = of_layer(module)
    return MODULE_RULES.find(type(module).__name__) if op is not None else None


def writes_nothing(module: nn.Module) -> bool:
    """Whether a module that works in place by itself has a rule that does not."""
    return not has_hooks(module) and module_rule(module) is _activation
