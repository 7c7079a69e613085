"""How each operation fuses: which rule runs a layer of torch.nn or a function for all members.

What is not here runs by vmap where every operation in it has a batching rule, else member by member; both are right
for whatever computes the same thing on slices as on whole tensors. Random functions are here by name so that members
never share what they draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.fusion.call import FusedCall, has_hooks
from outcore.fusion.rules import attention as attend
from outcore.fusion.rules import elementwise, recurrent
from outcore.fusion.rules.convolution import Convolution
from outcore.fusion.rules.matmul import linear
from outcore.fusion.rules.normalisation import batch_norm, group_norm, instance_norm, last_dims_norm
from outcore.fusion.values import Stacked
from outcore.graph.naming import function_name

__all__ = ["RANDOM", "run"]

RANDOM = frozenset(
    "rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like randint_like rrelu "
    "gumbel_softmax dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "
    "fractional_max_pool2d fractional_max_pool3d uniform_ normal_ bernoulli_ exponential_ random_ geometric_ "
    "log_normal_ cauchy_ rrelu_ dropout_ alpha_dropout_".split()
)
_CHANNEL_POOLS = frozenset("max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool".split())


def run(call: FusedCall) -> Any:
    """Run a step for all members by the best rule that applies."""
    if call.modules:
        return _module(call)
    name = function_name(call.target)
    if name in RANDOM:
        return _random(call, name)
    if not call.varies:
        return call.once()
    if call.per_member_args is None:
        rule = _FUNCTIONS.get(name) or _by_family(name)
        made = rule(call) if rule is not None else NotImplemented
        if made is not NotImplemented:
            return made
    return call.batched()


def _module(call: FusedCall) -> Any:
    module = call.module
    if type(module) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d) and not has_hooks(module):
        whole = None if type(module) is nn.Dropout else 2
        rates = [float(m.p) for m in call.modules]  # type: ignore[arg-type]
        return _dropout(call, call.args[0], rates, module.training, whole)
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) and module.training:
        return call.one_by_one()
    if type(module).__name__.startswith("FractionalMaxPool"):
        return call.one_by_one()
    if not call.varies:
        return call.once()
    rule = _MODULES.get(type(module)) if not has_hooks(module) else None
    made = rule(call) if rule is not None else NotImplemented
    if made is NotImplemented:
        return call.batched()
    call.ways.setdefault(call.name, "fused")
    return made


def _random(call: FusedCall, name: str) -> Any:
    if name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
        asked = [_dropout_arguments(call.target, *each) for each in call.per_member_args or ((call.args, call.kwargs),)]
        x, _, training = asked[0]
        rates = [p for _, p, _ in asked] * (call.members if len(asked) == 1 else 1)
        if isinstance(x, Stacked | torch.Tensor) and len({t for _, _, t in asked}) == 1:
            return _dropout(call, x, rates, training, None if name == "dropout" else 2)
    return call.one_by_one()


def _dropout_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    named = dict(zip(("input", "p", "train" if target is torch.dropout else "training"), args, strict=False)) | kwargs
    return named["input"], float(named.get("p", 0.5)), bool(named.get("training", named.get("train", True)))


def _dropout(call: FusedCall, x: Any, rates: list[float], training: bool, whole: int | None) -> Any:
    if whole is not None and (not isinstance(x, Stacked) or x.rank < 3):
        return call.one_by_one() if training else x
    return attend.dropout(call, x, rates, training, whole)


# Functions


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
        return Convolution.of(dims, stride, padding, dilation, groups).fused(input, weight, bias)

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
        return Convolution.of(dims, stride, padding, dilation, groups, output_padding).fused(input, weight, bias)

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


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
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


def _only_alone(call: FusedCall) -> Any:
    """Where vmap is wrong or misleading: member by member."""
    return call.one_by_one()


_FUNCTIONS: dict[str, Callable[[FusedCall], Any]] = {
    "linear": _bound(_linear),
    **{f"conv{d}d": _bound(_conv(d)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _bound(_conv_transpose(d)) for d in (1, 2, 3)},
    "batch_norm": _bound(_batch_norm),
    "layer_norm": _bound(_layer_norm),
    "group_norm": _bound(_group_norm),
    "embedding": _bound(_embedding),
    "scaled_dot_product_attention": _bound(_attention),
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


# Modules


def _of(call: FusedCall, *names: str) -> list[Any]:
    return [call.state.get(name) for name in names]


def _input(call: FusedCall) -> Any:
    return call.args[0] if call.args else call.kwargs["input"]


def _linear_module(call: FusedCall) -> Any:
    return linear(_input(call), *_of(call, "weight", "bias"))


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
        convolution = Convolution.of(dims, m.stride, padding, m.dilation, m.groups, extra)
        return convolution.fused(x, *_of(call, "weight", "bias"))

    return rule


def _batch_norm_module(call: FusedCall) -> Any:
    m: Any = call.module
    mean, var, count = _of(call, "running_mean", "running_var", "num_batches_tracked")
    if m.momentum is None or not call.same("momentum", "eps", "training", "track_running_stats", "affine"):
        return NotImplemented
    if type(m) is nn.SyncBatchNorm:
        return NotImplemented
    if m.training and count is not None:
        count.tensor.add_(1)
    training = m.training or mean is None
    if m.training and not m.track_running_stats:
        mean = var = None
    weight, bias = _of(call, "weight", "bias")
    return batch_norm(_input(call), mean, var, weight, bias, training, m.momentum, m.eps)


def _instance_norm_module(call: FusedCall) -> Any:
    m: Any = call.module
    x = _input(call)
    if m.momentum is None or not isinstance(x, Stacked) or not call.same("momentum", "eps", "training"):
        return NotImplemented
    if x.rank != {"1": 3, "2": 4, "3": 5}[type(m).__name__[-2]]:
        return NotImplemented
    mean, var, weight, bias = _of(call, "running_mean", "running_var", "weight", "bias")
    return instance_norm(x, mean, var, weight, bias, m.training or not m.track_running_stats, m.momentum, m.eps)


def _group_norm_module(call: FusedCall) -> Any:
    m: Any = call.module
    return (
        group_norm(_input(call), m.num_groups, call.state.get("weight"), call.state.get("bias"), m.eps)
        if call.same("eps")
        else NotImplemented
    )


def _last_dims_module(norm: Any) -> Callable[[FusedCall], Any]:
    def rule(call: FusedCall) -> Any:
        m: Any = call.module
        if not call.same("eps"):
            return NotImplemented
        return last_dims_norm(
            norm, _input(call), m.normalized_shape, call.state.get("weight"), call.state.get("bias"), m.eps
        )

    return rule


def _embedding_module(call: FusedCall) -> Any:
    m: Any = call.module
    if not call.same("padding_idx", "max_norm"):
        return NotImplemented
    return _embedding(
        _input(call), call.state["weight"], m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse
    )


def _activation(call: FusedCall) -> Any:
    """A module that applies one function to each element."""
    x, m = _input(call), call.module
    if not isinstance(x, Stacked) or not call._alike():
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
    return elementwise.per_channel(call, int(type(call.module).__name__[-2]))


def _resize(call: FusedCall) -> Any:
    x = _input(call)
    return elementwise.per_channel(call, x.rank - 2) if isinstance(x, Stacked) else NotImplemented


_ACTIVATIONS = (
    "ReLU ReLU6 GELU SiLU Mish ELU SELU CELU LeakyReLU Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink "
    "Softplus Softsign Tanh Tanhshrink Sigmoid LogSigmoid Threshold"
).split()
_POOLS = [f"{kind}Pool{d}d" for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax", "LP") for d in (1, 2, 3)]
_MODULES: dict[type[nn.Module], Callable[[FusedCall], Any]] = {
    nn.Linear: _linear_module,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear_module,
    **{getattr(nn, f"Conv{d}d"): _conv_module(d, False) for d in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{d}d"): _conv_module(d, True) for d in (1, 2, 3)},
    **{getattr(nn, f"BatchNorm{d}d"): _batch_norm_module for d in (1, 2, 3)},
    **{getattr(nn, f"InstanceNorm{d}d"): _instance_norm_module for d in (1, 2, 3)},
    nn.GroupNorm: _group_norm_module,
    nn.LayerNorm: _last_dims_module(F.layer_norm),
    nn.RMSNorm: _last_dims_module(F.rms_norm),
    nn.Embedding: _embedding_module,
    nn.PReLU: _prelu,
    nn.Identity: _identity,
    **{getattr(nn, name): _activation for name in _ACTIVATIONS},
    **{getattr(nn, name): _pool for name in _POOLS if hasattr(nn, name)},
    **{getattr(nn, name): _resize for name in ("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d")},
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), recurrent.recurrent),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), recurrent.cell),
}


def is_random(step: Any, model: nn.Module) -> bool:
    """Whether a recorded step draws random numbers."""
    if step.kind == "module":
        module = model.get_submodule(step.target)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return module.training and module.p > 0
        inner = isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
        return ((isinstance(module, nn.RReLU) or inner) and module.training) or "Fractional" in type(module).__name__
    name = function_name(step.target)
    if name == "scaled_dot_product_attention":
        return bool(step.kwargs.get("dropout_p", step.args[4] if len(step.args) > 4 else 0.0))
    if name.startswith("dropout"):
        _, rate, training = _dropout_arguments(step.target, step.args, step.kwargs)
        return training and rate > 0
    return name in RANDOM


def writes_nothing(module: nn.Module) -> bool:
    """Whether the rule of a module that works in place alone does not when fused."""
    return not has_hooks(module) and _MODULES.get(type(module)) is _activation
