"""From a recorded call to the operations it consists of.

An analytic cost needs to know that ``layer1.0.conv1#0`` is a convolution of 64 to 64 channels with a 3 x 3 kernel on
56 x 56 pixels. Layers say so in their attributes, functions in their arguments, and shapes stand in the graph. What
only rearranges costs nothing but its dispatch; what is not known here costs what its FLOPs and bytes say, and is
marked so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from outcore.cost.predicted.operation import Operation
from outcore.graph import Call, Graph, Value
from outcore.graph.record.recording import Ref, Step
from outcore.graph.structure import leaves
from outcore.ops.registry import Facet, find, kinds, names, operation
from outcore.ops.signature import SIGNATURES
from outcore.ops.traits import WITHOUT_WORK


@dataclass(frozen=True)
class _Facts:
    """What is known of one call."""

    graph: Graph
    step: Step
    call: Call
    type: str
    layer: Any
    """The module; None for a function."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    dtype: str

    @property
    def x(self) -> Value:
        return self.inputs[0] if self.inputs else self.outputs[0]

    @property
    def y(self) -> Value:
        return self.outputs[0]

    @property
    def common(self) -> dict[str, Any]:
        image = len(self.x.shape) in (4, 5) and self.x.shape[1] > 1
        last = image and bool(self.x.stride) and self.x.stride[1] == 1 and self.x.stride[-1] != 1
        wanted = self.x.requires_grad or not self.inputs
        return {"dtype": self.dtype, "channels_last": last, "input_grad": wanted}

    def setting(self, name: str) -> Any:
        """An attribute of the layer, or an argument of the function, or its default; None where it has none."""
        signature = SIGNATURES.find(self.type)
        assert signature is not None
        if self.layer is not None:
            return getattr(self.layer, name, signature.defaults.get(name))
        return signature.bound(self.step.args, self.step.kwargs).get(name)

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight of a layer, or of the second argument of a function."""
        if self.layer is not None:
            return tuple(self.layer.weight.shape)
        ref = self.step.kwargs.get("weight", self.step.args[1] if len(self.step.args) > 1 else None)
        return self.shape_of(ref)

    def shape_of(self, ref: Any) -> tuple[int, ...]:
        if isinstance(ref, Ref) and ref.kind == "value":
            return self.graph.values[ref.name].shape
        if isinstance(ref, Ref) and ref.kind == "state":
            return tuple(attrgetter(ref.name)(self.graph.module.model).shape)
        return ()


def describe(graph: Graph, step: Step, precision: Callable[[str], str]) -> Operation | None:
    """The operation a call consists of, forward; None where it is nothing, or nothing known.

    Args:
        graph: as captured, with its model.
        step: the call's step in the recording.
        precision: the precision that tensors of a dtype are computed in.
    """
    call = graph.calls[step.name]
    block = graph.blocks[call.block]
    outputs = tuple(graph.values[v] for v in call.outputs)
    if not outputs or not outputs[0].shape or math.prod(outputs[0].shape) == 0:
        return None
    layer = attrgetter(step.target)(graph.module.model) if step.kind == "module" else None
    inputs = tuple(graph.values[r.name] for _, r in leaves((step.args, step.kwargs), Ref) if r.kind == "value")
    facts = _Facts(graph, step, call, block.type, layer, inputs, outputs, precision(outputs[0].dtype))
    if block.type not in WITHOUT_WORK and is_idle(graph, step):
        return None
    make = WORK.find(block.type)
    if make is not None:
        return make(facts)
    if block.type in WITHOUT_WORK:
        copies = outputs[0].alias_of is None and block.type in ("contiguous", "reshape", "to") and inputs
        return _copy(facts) if copies else None
    return _elementwise()(facts) if block.kind == "function" and inputs else None


def is_idle(graph: Graph, step: Step) -> bool:
    """Whether a call runs no kernel in forward: it rearranges, or drops nothing out."""
    block = graph.blocks[graph.calls[step.name].block]
    if block.type in WITHOUT_WORK:
        return True
    op = find(block.type)
    if op is None or op.kind != "dropout":
        return False
    if step.kind == "module":
        layer = attrgetter(step.target)(graph.module.model)
        return float(getattr(layer, "p", 1.0)) == 0.0 or not layer.training
    signature = SIGNATURES.find(block.type)
    assert signature is not None
    given = signature.bound(step.args, step.kwargs)
    return bool(given["p"] == 0.0 or given.get("train", given["training"]) is False)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (int(value),) * dims if isinstance(value, int) else tuple(int(v) for v in value)


def _convolution(facts: _Facts) -> Operation | None:
    weight = facts.weight_shape()
    dims = len(weight) - 2
    if dims < 1 or not facts.inputs or len(facts.x.shape) != dims + 2:
        return None
    transposed = facts.type in names(*kinds("transposed convolution"))
    padding = facts.setting("padding")
    if padding == "same":
        padding = tuple(k // 2 for k in weight[2:])
    elif padding == "valid":
        padding = 0
    return Operation(
        "conv_transpose" if transposed else "conv",
        batch=facts.x.shape[0],
        in_channels=facts.x.shape[1],
        out_channels=facts.y.shape[1],
        size=facts.x.shape[2:],
        kernel=weight[2:],
        stride=_tuple(facts.setting("stride"), dims),
        padding=_tuple(padding, dims),
        dilation=_tuple(facts.setting("dilation"), dims),
        output_padding=_tuple(facts.setting("output_padding"), dims) if transposed else (),
        groups=int(facts.setting("groups")),
        bias=facts.setting("bias") is not None,
        **facts.common,
    )


def _linear(facts: _Facts) -> Operation | None:
    weight = facts.weight_shape()
    if len(weight) != 2:
        return None
    if facts.type in names("transposed_linear"):  # Hugging Face's Conv1D
        weight = weight[::-1]
    rows = math.prod(facts.y.shape[:-1])
    return Operation("linear", batch=rows, in_channels=weight[1], out_channels=weight[0], **facts.common)


def _matmul(facts: _Facts) -> Operation | None:
    if len(facts.inputs) < 2 or min(len(v.shape) for v in facts.inputs[-2:]) < 2:
        return None
    a, b = facts.inputs[-2:]
    matrices = math.prod(facts.y.shape[:-2])
    return Operation(
        "matmul", batch=matrices, in_channels=a.shape[-1], out_channels=b.shape[-1], size=(a.shape[-2],), **facts.common
    )


def _attention(facts: _Facts) -> Operation | None:
    query, key, value = (facts.shape_of(r) for r in facts.step.args[:3]) if len(facts.step.args) >= 3 else ((), (), ())
    if min(map(len, (query, key, value))) < 3:
        return None
    heads = query[-3]
    return Operation(
        "attention",
        batch=math.prod(query[:-3]),
        in_channels=query[-1],
        out_channels=value[-1],
        size=(query[-2], key[-2]),
        groups=heads,
        variant="causal" if facts.setting("is_causal") is True else "",
        **facts.common,
    )


def _norm(variant: str) -> Callable[[_Facts], Operation | None]:
    def make(facts: _Facts) -> Operation | None:
        shape = facts.x.shape
        if variant in ("layer", "rms"):
            return Operation(
                "norm", batch=math.prod(shape[:-1]), in_channels=shape[-1], variant=variant, **facts.common
            )
        if len(shape) < 2:
            return None
        groups = int(getattr(facts.layer, "num_groups", 1))
        return Operation("norm", shape[0], shape[1], size=shape[2:], groups=groups, variant=variant, **facts.common)

    return make


def _pool(variant: str) -> Callable[[_Facts], Operation | None]:
    def make(facts: _Facts) -> Operation | None:
        dims = len(facts.y.shape) - 2
        if dims < 1 or len(facts.x.shape) != dims + 2:
            return None
        if facts.type in _ADAPTIVE and variant == "avg" and math.prod(facts.y.shape[2:]) == 1:
            return _elementwise("relu")(facts)  # torch computes it as a mean, and it is predicted as one
        if facts.type in _ADAPTIVE:
            kernel = stride = tuple(
                max(1, i // max(1, o)) for i, o in zip(facts.x.shape[2:], facts.y.shape[2:], strict=True)
            )
            padding: Any = 0
        else:
            kernel = _tuple(facts.setting("kernel_size"), dims)
            stride = _tuple(facts.setting("stride") or kernel, dims)
            padding = facts.setting("padding")
        return Operation(
            "pool",
            facts.x.shape[0],
            facts.x.shape[1],
            size=facts.x.shape[2:],
            kernel=kernel,
            stride=stride,
            padding=_tuple(padding, dims),
            variant=variant,
            **facts.common,
        )

    return make


def _softmax(facts: _Facts) -> Operation | None:
    shape = facts.y.shape
    return Operation("softmax", batch=math.prod(shape[:-1]), in_channels=shape[-1], **facts.common)


def _embedding(facts: _Facts) -> Operation | None:
    weight = facts.weight_shape()
    if len(weight) != 2:
        return None
    return Operation(
        "embedding", math.prod(facts.y.shape[:-1]), in_channels=weight[0], out_channels=weight[1], **facts.common
    )


def _flat(facts: _Facts, kind: str, variant: str) -> Operation:
    """The larger of input and output, as an image or as rows."""
    shape = max((v.shape for v in (facts.y, *facts.inputs[:1])), key=math.prod)
    channels = shape[1] if len(shape) > 1 else 1
    return Operation(kind, shape[0], channels, size=shape[2:], variant=variant, **facts.common)  # type: ignore[arg-type]


def _elementwise(variant: str = "") -> Callable[[_Facts], Operation]:
    def make(facts: _Facts) -> Operation:
        chosen = variant or ("add" if len(facts.inputs) > 1 else "relu")
        one_tensor = chosen in ("add", "mul") and len(facts.inputs) == 1 and not facts.call.parameters
        return _flat(facts, "elementwise", "relu" if one_tensor else chosen)  # beside a number, one tensor is read

    return make


def _copy(facts: _Facts) -> Operation:
    # Rows that stay whole are copied at the rate of any copy, in whatever order.
    turned = facts.type in ("contiguous", "reshape") and facts.inputs and facts.x.stride[-1:] not in ((), (1,))
    return _flat(facts, "copy", "layout" if turned else "")


_ADAPTIVE = names(*kinds("adaptive average pool", "adaptive max pool"))

WORK: Facet[Callable[[_Facts], Operation | None]] = Facet("cost", "the sizes from which its time is predicted")
WORK.add(_convolution, *kinds("convolution", "transposed convolution"))
WORK.add(_linear, "linear", "transposed_linear")
WORK.add(_matmul, "matmul", "bmm", "baddbmm", "mm")
WORK.add(_attention, "scaled_dot_product_attention")
WORK.add(_norm("batch"), "batch_norm", "sync_batch_norm")
for _name in ("instance", "layer", "group", "rms"):
    WORK.add(_norm(_name), f"{_name}_norm")
WORK.add(_pool("max"), *kinds("max pool", "adaptive max pool"))
WORK.add(_pool("avg"), *kinds("average pool", "adaptive average pool"))
WORK.add(_softmax, "softmax", "log_softmax")
WORK.add(_embedding, "embedding")
WORK.add(_copy, *"cat stack clone pad interpolate flip roll repeat copy_ setitem".split())
_VARIANTS = {
    "gelu": "gelu erf softplus mish",
    "silu": "silu",
    "sigmoid": "sigmoid tanh exp log sqrt rsqrt pow sin cos reciprocal elu square",
    "hardswish": "hardswish hardsigmoid",
    "dropout": "dropout dropout1d dropout2d dropout3d bernoulli",
    "mul": "mul div masked_fill where",
    "add": "add sub",
    "relu": "relu relu6 leaky_relu prelu hardtanh clamp neg abs threshold",
}
for _variant, _operations in _VARIANTS.items():
    WORK.add(_elementwise(_variant), *_operations.split())
WORK.add(_elementwise(), *(name for name in kinds("activation") if "cost" not in operation(name).facts))
