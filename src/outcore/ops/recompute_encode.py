"""What can be done with a tensor that backward keeps: run its operation again, keep less of it, or encode it.

Running an operation a second time gives the same numbers if it reads nothing but its arguments and parameters. Two
kinds of exceptions can be handled: one that keeps *statistics* runs again without writing them, and a *random* one
with the generator put back to where it was. Of whatever is not named here nothing is known, and it is never run again.

Of what autograd keeps, backward often needs less than the numbers: ReLU only where the output is above zero, a pool
only the shape of its input, a convolution whose weights are frozen nothing of its input but the shape.

Encodings are smaller forms between forward and backward. Exact ones follow from what backward needs (Gist, ISCA 2018):
where only the sign matters, one bit per element; indices of a pool as positions in its window, one byte instead of
eight; masks as bits. (Where only the shape matters, as with the input of a pool, nothing is kept at all; that costs
nothing and needs no codec.) How small *sparse* is depends on the data, so that no budget can count on it: only by name.
Lossy ones (fewer bits per number) are never chosen unless they are asked for by name either.

    codec     for                              bytes in between        bytes when it is back
    sign      output of ReLU, used nowhere     1 bit per element       the same: bits are all backward reads
    window    indices of a max pool (*)        1 per index             8 per index
    bits      mask of a dropout                1 bit per element       as it was
    sparse    any with many zeros              1 bit + the others      all
    half      any float32 (lossy)              half                    all
    bf16      the same with float32's range    half                    all
    int8      any float (lossy)                1 per element + scales  all
    int4      any float (lossy)                a half each + scales    all

(*) over windows of at most 255 pixels, so that a byte can name each, and none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch

from outcore.ops.registry import Facet, find, kinds

Again = Literal["pure", "statistics", "random"]
Need = Literal["full", "sign", "shape"]

AGAIN: Facet[Again] = Facet("again", "how it is run a second time with the same result")
_PURE = (
    "convolution, transposed convolution, linear, matrix product, recurrent cell, norm, max pool, average pool, "
    "adaptive average pool, adaptive max pool, power-average pool, activation, activation with a weight, "
    "gated activation, softmax, sum, product, arithmetic, selection, comparison, cast, copy, identity, view, window, "
    "join, rearrangement, pad, resampling, shuffle, reduction, extreme, indexing, creation, distance"
)
_OPAQUE = {"transposed_linear", "as_strided"}
"""Not torch's own class; reads memory beyond the tensor it is given."""
AGAIN.add("pure", *(name for name in kinds(*_PURE.split(", ")) if name not in _OPAQUE), "cumsum", "embedding")
AGAIN.add("statistics", "batch_norm", "instance_norm")
AGAIN.add("random", *kinds("dropout"), "alpha_dropout", "feature_alpha_dropout", "bernoulli")
AGAIN.add("random", "rand", "randn", "rand_like", "randn_like", "normal", "uniform_")

FOLDS: Facet[bool] = Facet("folds", "multiplies by a matrix that requires a gradient as one product, not as a batch")
FOLDS.add(True, "matmul", "rmatmul", "linear")
FOLDING = FOLDS.where()
"""Names of operations whose way of computing depends on whether the matrix requires a gradient."""

ATOMS: frozenset[type] = frozenset(
    {int, float, bool, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size}
    | {torch.memory_format, torch.layout, torch.Generator}
)
"""Types of arguments that nobody can change."""


def can_be_held(value: Any, *tensors: type) -> bool:
    """Whether an argument can be held until its call runs again: a tensor, or what cannot change or is copied.

    A plan and the forward that follows it have to agree on this: what was planned to be made again and cannot be held
    is kept, and was not counted.
    """
    kind = type(value)
    if kind in ATOMS or isinstance(value, (np.generic, torch.Tensor, *tensors)):
        return True
    if kind is slice:
        value = value.start, value.stop, value.step
    elif kind is not tuple and not isinstance(value, list):
        return False
    return all(can_be_held(part, *tensors) for part in value)


NEEDED: Facet[Need] = Facet("backward reads", "what backward needs of the tensor it keeps, if less than its numbers")
NEEDED.add("sign", "relu")
NEEDED.add("shape", *(f"{pool}{n}d" for pool in ("max_pool", "avg_pool", "adaptive_avg_pool") for n in (2, 3)))

Codec = Literal["sign", "window", "bits", "sparse", "half", "bf16", "int8", "int4"]
CODECS: tuple[Codec, ...] = ("sign", "window", "bits", "sparse", "half", "bf16", "int8", "int4")
LOSSY: tuple[Codec, ...] = ("half", "bf16", "int8", "int4")
GROUP = 256
"""Numbers that share a scale under int8 and int4."""
PIXELS = 255
"""The largest window whose pixels one byte can name."""

ENCODES: Facet[Codec] = Facet("encoding", "the smaller form of what it makes for its backward")
ENCODES.add("window", "max_pool2d", "max_pool3d")
ENCODES.add("bits", "dropout")
POOLS = ENCODES.where(lambda codec: codec == "window")
"""Names of pools whose indices fit into a byte each."""
_TYPES: Mapping[str, tuple[str, ...]] = {
    "window": ("int64",),
    "bits": ("bool", "float64", "float32", "float16", "bfloat16"),
}


def again(type_: str) -> Again | None:
    """How an operation is run again; none if it must not be."""
    return AGAIN.find(type_)


def need(type_: str, role: Literal["input", "output"], *, weights_trained: bool) -> Need:
    """What backward of an operation needs of a value it keeps.

    >>> need("ReLU", "output", weights_trained=False), need("MaxPool2d", "input", weights_trained=False)
    ('sign', 'shape')
    >>> need("Conv2d", "input", weights_trained=True), need("Conv2d", "input", weights_trained=False)
    ('full', 'shape')
    """
    known, op = NEEDED.find(type_), find(type_)
    if role == "output":
        return "sign" if known == "sign" else "full"
    frozen = op is not None and op.kind == "convolution" and not weights_trained
    return "shape" if known == "shape" or frozen else "full"


class EncodableTensor(Protocol):
    """What a rule looks at."""

    @property
    def kind(self) -> str:
        """Value, derived or given."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def element_bytes(self) -> int:
        """Of one number; not known of a derived one."""

    @property
    def dtype(self) -> str:
        """For a derived tensor: its type, as torch spells it; empty where it is not known."""

    @property
    def maker(self) -> str:
        """For a derived tensor: the type of the call that made it; empty where its smaller form would not hold it."""

    @property
    def need(self) -> Need:
        """What backward needs of it."""


def codec_for(kept: EncodableTensor) -> Codec | None:
    """The smallest exact form of a kept tensor, if there is one.

    >>> from outcore.cost.buffers import Buffer
    >>> codec_for(Buffer("relu#0:out", "value", 400, 4, 0, 0, 0, {0: "sign"}))
    'sign'
    """
    if kept.kind == "derived":
        codec = ENCODES.find(kept.maker)
        return codec if codec is not None and kept.dtype in _TYPES[codec] else None
    return "sign" if kept.need == "sign" else None


def held_bytes(kept: EncodableTensor, codec: str) -> tuple[int, int]:
    """Bytes of an encoded tensor in between, and when it is back."""
    size = kept.bytes
    item = _item_bytes(kept)
    match codec:
        case "sign":
            return -(-size // item // 8), -(-size // item // 8)
        case "window":
            return size // 8, size
        case "bits":
            return -(-size // item // 8), size
        case "sparse":  # as if half of it were zero, as behind a ReLU of random numbers
            return -(-size // item // 8) + size // 2, size
        case "half" | "bf16":
            return size // 2, size
        case _:
            count = size // item
            return -(-count // (1 if codec == "int8" else 2)) + 8 * -(-count // GROUP), size


def _item_bytes(kept: EncodableTensor) -> int:
    if kept.kind != "derived":
        return kept.element_bytes
    sizes = {"bool": 1, "int64": 8, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    return sizes.get(kept.dtype, 1)
