"""What the backward of each operation keeps, on a CPU and on a GPU.

Read off torch's derivative formulas and checked against what a CPU really keeps (tests/ops) and a GPU really keeps (the
tests marked `gpu`). Of an operation that is not here, what it keeps is found by trying, or not known.

Rules look at one call of an operation (`CallFacts`) and name what its backward keeps. `KeptTensor` is one tensor that
autograd holds between forward and backward. It is either something the graph knows (an input, the output, a parameter)
or *derived*: made by the operation for its backward alone, with a size that follows from the shapes of the call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from outcore.ops.registry import Facet, kinds

What = Literal["input", "output", "parameter", "derived"]


class Operand(Protocol):
    """A tensor that goes in or comes out, as a graph describes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> str:
        """As torch spells it, e.g. "float32"."""

    @property
    def bytes(self) -> int:
        """Elements times their size."""

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes its gradient."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a rule may look at: one call of an operation."""

    is_module: bool
    """A layer of torch.nn, not a function."""
    settings: str
    """Arguments that are not tensors, as one would print them."""
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    parameters: tuple[str, ...] = ()
    training: bool = True
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """One thing that is kept."""

    what: What
    index: int | None = None
    """Which input; none for all of them."""
    name: str = ""
    """Of a parameter ("weight"), or what a derived tensor is ("indices")."""
    bytes: Callable[[CallFacts], int] | None = None
    """Size of a derived tensor."""
    when: Callable[[CallFacts], bool] | None = None
    """None for always."""

    def applies(self, facts: CallFacts) -> bool:
        """Whether it is kept in this call."""
        return self.when is None or self.when(facts)


@dataclass(frozen=True, slots=True)
class SavedRule:
    """What the backward of an operation keeps."""

    keeps: tuple[KeptTensor, ...] = ()
    keeps_on: Mapping[str, tuple[KeptTensor, ...]] = field(default_factory=dict)
    """The same for kinds of devices that keep something else."""

    def kept(self, device_kind: str) -> tuple[KeptTensor, ...]:
        """What it keeps on a kind of device ("cpu", "cuda")."""
        return self.keeps_on.get(device_kind, self.keeps)

    def words(self) -> tuple[str, ...]:
        """What it keeps, in words."""
        every = dict.fromkeys((*self.keeps, *(k for more in self.keeps_on.values() for k in more)))
        return tuple(dict.fromkeys(keep.name or keep.what for keep in every))


SAVED: Facet[SavedRule] = Facet("saved", "what its backward keeps")

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
_LOGSUMEXP = KeptTensor(
    "derived", name="sum of exponentials", bytes=lambda f: 4 * _elements(f.outputs[0].shape[:-1]) if f.outputs else 0
)
_SEED = KeptTensor("derived", name="random state", bytes=lambda f: 16)
_ATTENTION = (KeptTensor("input"), OUTPUT, _LOGSUMEXP)


def _keeps(*operations: str, keeps: tuple[KeptTensor, ...] = (), cuda: tuple[KeptTensor, ...] | None = None) -> None:
    SAVED.add(SavedRule(keeps, {} if cuda is None else {"cuda": cuda}), *operations)


def _normalised(count: Callable[[CallFacts], int], when: Callable[[CallFacts], bool] | None = None) -> KeptTensor:
    """Mean and deviation of what is normalised together."""
    return KeptTensor("derived", name="mean and deviation", bytes=lambda f: 2 * _float_bytes(f) * count(f), when=when)


_NOT_IN_PLACE = KeptTensor("input", 0, when=lambda f: not _in_place(f))

_keeps(*kinds("convolution", "transposed convolution"), keeps=(INPUT, WEIGHT))
_keeps("linear", keeps=(INPUT, KeptTensor("parameter", name="weight", when=lambda f: f.inputs[0].requires_grad)))
_keeps("matmul", "bmm", "mm", keeps=(_other_needs_gradient(0), _other_needs_gradient(1)))
_keeps("batch_norm", keeps=(INPUT, WEIGHT, _normalised(_channels, when=_training)))
_keeps("layer_norm", keeps=(INPUT, WEIGHT, _normalised(_rows)))
_keeps("group_norm", keeps=(INPUT, WEIGHT, _normalised(_groups)))
_keeps("relu", "sigmoid", "tanh", *"softmax log_softmax softmin".split(), keeps=(OUTPUT,))
_keeps(*"exp exp2 expm1 sqrt rsqrt reciprocal tan".split(), keeps=(OUTPUT,))
_keeps("leaky_relu", keeps=(_NOT_IN_PLACE, KeptTensor("output", when=_in_place)))
_keeps(*"gelu mish hardsigmoid elu selu celu softplus softshrink hardshrink glu".split(), keeps=(INPUT,))
_keeps(*"log2 log10 log1p square sin cos asin acos atan sinh cosh erf erfc nan_to_num var".split(), keeps=(INPUT,))
_keeps(*"prod std norm amax amin logsumexp".split(), keeps=(INPUT, OUTPUT))
# Their backward needs what they overwrite where they work in place, so a copy is kept.
_copy = KeptTensor("derived", name="copy", bytes=lambda f: f.inputs[0].bytes, when=_in_place)
_keeps("silu", "hardswish", "relu6", "hardtanh", "threshold", keeps=(_NOT_IN_PLACE, _copy))
_keeps("abs", "log", "clamp", "clamp_min", "clamp_max", keeps=(_NOT_IN_PLACE, _copy))
_keeps("max_pool2d", "max_pool3d", keeps=(INPUT, _INDICES))
_keeps("avg_pool2d", "avg_pool3d", keeps=(INPUT,))
_keeps("adaptive_avg_pool2d", keeps=(KeptTensor("input", 0, when=lambda f: not _global_pool(f)),))
_keeps("dropout", keeps=(_mask(None),), cuda=(_mask(1),))
_keeps(*kinds("sum", "view", "cast", "copy", "join", "rearrangement", "pad", "shuffle", "comparison", "search"))
_keeps(*"interpolate unfold neg positive sign round floor ceil trunc cumsum mean sum tril triu".split())
_keeps(
    "mul",
    keeps=(
        _other_needs_gradient(0),
        _other_needs_gradient(1),
        KeptTensor("input", 0, when=_square_needs_gradient),
    ),
)
_keeps("embedding", keeps=(INPUT,))
_keeps("scaled_dot_product_attention", keeps=_ATTENTION, cuda=(*_ATTENTION, _SEED))
_keeps(
    "cross_entropy",
    keeps=(
        KeptTensor("input", 1),
        KeptTensor("derived", name="log of probabilities", bytes=lambda f: f.inputs[0].bytes),
        KeptTensor("derived", name="total weight", bytes=_float_bytes),
    ),
)
