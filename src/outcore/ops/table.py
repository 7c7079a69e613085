"""The table: one row per operation, what its backward keeps on a CPU and on a GPU.

Read off torch's derivative formulas and checked against what a CPU really keeps (tests/ops) and a GPU really keeps (the
tests marked `gpu`). An operation that is not here is opaque: what it keeps is found by trying, or not known.
"""

from __future__ import annotations

import math
import re

from outcore.ops.op import CallFacts, KeptTensor, Op

__all__ = ["TABLE", "find"]

INPUT = KeptTensor("input", 0)
OUTPUT = KeptTensor("output")
WEIGHT = KeptTensor("parameter", name="weight")


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _in_place(facts: CallFacts) -> bool:
    return facts.in_place


def _other_needs_gradient(index: int) -> KeptTensor:
    """A factor is kept for the gradient of the other factor."""

    def when(facts: CallFacts) -> bool:
        others = [v for i, v in enumerate(facts.inputs) if i != index]
        weights = len(facts.parameters) > 0
        return len(facts.inputs) > index and (weights or any(v.requires_grad for v in others))

    return KeptTensor("input", index, when=when)


def _square_needs_gradient(facts: CallFacts) -> bool:
    return len(facts.inputs) == 1 and facts.inputs[0].requires_grad and not re.search(r"\d", facts.settings)


def _channels(facts: CallFacts) -> int:
    shape = facts.inputs[0].shape
    return shape[1] if len(shape) > 1 else shape[0]


def _rows(facts: CallFacts) -> int:
    """Rows that layer norm normalises: all elements over those of the normalised shape, the first in its settings."""
    shape = facts.inputs[0].shape
    match = re.search(r"\(([\d, ]+)\)", facts.settings)
    normalised = [int(n) for n in match[1].split(",") if n.strip()] if match else list(shape[-1:])
    return _elements(shape) // max(1, math.prod(normalised))


def _groups(facts: CallFacts) -> int:
    match = re.match(r"(\d+)", facts.settings)
    return facts.inputs[0].shape[0] * (int(match[1]) if match else 1)


def _float_bytes(facts: CallFacts) -> int:
    """Statistics are in the input's precision, but never below float32 on a GPU."""
    return 8 if facts.inputs[0].dtype == "float64" else 4


def _drops(facts: CallFacts) -> bool:
    rate = re.search(r"p=([\d.e-]+)|^([\d.e-]+)", facts.settings)
    active = facts.training if facts.is_module else "training=False" not in facts.settings
    return active and not (rate and float(rate[1] or rate[2]) == 0.0) and ", False" not in facts.settings


def _mask(per_element: int | None) -> KeptTensor:
    def size(facts: CallFacts) -> int:
        value = facts.outputs[0]
        return value.bytes if per_element is None else per_element * _elements(value.shape)

    return KeptTensor("derived", name="mask", bytes=size, when=_drops)


def _training(facts: CallFacts) -> bool:
    if facts.is_module:
        return facts.training or "track_running_stats=False" in facts.settings
    return "training=True" in facts.settings or "True" in facts.settings


def _global_pool(facts: CallFacts) -> bool:
    return math.prod(facts.outputs[0].shape[2:]) == 1


_INDICES = KeptTensor("derived", name="indices", bytes=lambda f: 8 * _elements(f.outputs[0].shape))
_STATISTICS = "mean and deviation"
_LOGSUMEXP = KeptTensor(
    "derived", name="sum of exponentials", bytes=lambda f: 4 * _elements(f.outputs[0].shape[:-1]) if f.outputs else 0
)
_SEED = KeptTensor("derived", name="random state", bytes=lambda f: 16)
_ATTENTION = (KeptTensor("input"), OUTPUT, _LOGSUMEXP)

TABLE: tuple[Op, ...] = (
    Op(
        "convolution",
        (
            *(f"Conv{t}{n}d" for t in ("", "Transpose") for n in (1, 2, 3)),
            *(f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)),
        ),
        (INPUT, WEIGHT),
    ),
    Op(
        "linear",
        ("Linear", "linear"),
        (INPUT, KeptTensor("parameter", name="weight", when=lambda f: f.inputs[0].requires_grad)),
    ),
    Op("matmul", ("matmul", "bmm", "mm"), (_other_needs_gradient(0), _other_needs_gradient(1))),
    Op(
        "batch norm",
        ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "batch_norm"),
        (
            INPUT,
            WEIGHT,
            KeptTensor("derived", name=_STATISTICS, bytes=lambda f: 2 * _float_bytes(f) * _channels(f), when=_training),
        ),
    ),
    Op(
        "layer norm",
        ("LayerNorm", "layer_norm"),
        (INPUT, WEIGHT, KeptTensor("derived", name=_STATISTICS, bytes=lambda f: 2 * _float_bytes(f) * _rows(f))),
    ),
    Op(
        "group norm",
        ("GroupNorm", "group_norm"),
        (INPUT, WEIGHT, KeptTensor("derived", name=_STATISTICS, bytes=lambda f: 2 * _float_bytes(f) * _groups(f))),
    ),
    Op("relu", ("ReLU", "relu", "relu_", "Sigmoid", "sigmoid", "Tanh", "tanh"), (OUTPUT,)),
    Op("softmax", ("Softmax", "softmax", "LogSoftmax", "log_softmax"), (OUTPUT,)),
    Op(
        "leaky relu",
        ("LeakyReLU", "leaky_relu"),
        (KeptTensor("input", 0, when=lambda f: not _in_place(f)), KeptTensor("output", when=_in_place)),
    ),
    Op("smooth activation", ("GELU", "gelu", "Mish", "mish", "Hardsigmoid"), (INPUT,)),
    Op(
        "activation that may overwrite its input",
        ("SiLU", "silu", "Hardswish", "hardswish", "ReLU6", "relu6"),
        (
            KeptTensor("input", 0, when=lambda f: not _in_place(f)),
            # Its backward needs what it overwrites, so a copy is kept.
            KeptTensor("derived", name="copy", bytes=lambda f: f.inputs[0].bytes, when=_in_place),
        ),
    ),
    Op("max pool", tuple(f"{m}{n}d" for m in ("MaxPool", "max_pool") for n in (2, 3)), (INPUT, _INDICES)),
    Op("average pool", tuple(f"{m}{n}d" for m in ("AvgPool", "avg_pool") for n in (2, 3)), (INPUT,)),
    Op(
        "adaptive average pool",
        ("AdaptiveAvgPool2d", "adaptive_avg_pool2d"),
        (KeptTensor("input", 0, when=lambda f: not _global_pool(f)),),
    ),
    Op(
        "dropout",
        ("Dropout", "dropout"),
        (_mask(None),),
        {"cuda": (_mask(1),)},
    ),
    Op("join", ("cat", "stack", "add", "add_", "sub", "flatten", "reshape", "view", "transpose", "permute"), ()),
    Op(
        "product",
        ("mul", "mul_"),
        (
            _other_needs_gradient(0),
            _other_needs_gradient(1),
            KeptTensor("input", 0, when=_square_needs_gradient),
        ),
    ),
    Op("embedding", ("Embedding", "embedding"), (INPUT,)),
    Op(
        "attention",
        ("scaled_dot_product_attention",),
        _ATTENTION,
        {"cuda": (*_ATTENTION, _SEED)},
    ),
    Op("interpolate", ("Upsample", "interpolate"), ()),
    Op(
        "cross entropy",
        ("CrossEntropyLoss", "cross_entropy"),
        (
            KeptTensor("input", 1),
            KeptTensor("derived", name="log of probabilities", bytes=lambda f: f.inputs[0].bytes),
            KeptTensor("derived", name="total weight", bytes=lambda f: _float_bytes(f)),
        ),
    ),
)
"""All operations."""

_BY_TYPE = {type_: op for op in TABLE for type_ in op.types}


def find(type_: str) -> Op | None:
    """The row of a block's type; none if the operation is opaque."""
    return _BY_TYPE.get(type_)
