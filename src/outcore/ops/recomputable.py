"""Which operations can be run again in backward, and what their backward really needs of what it keeps.

Running an operation a second time gives the same numbers if it reads nothing but its arguments and parameters. Two
kinds of exceptions can be handled: one that keeps *statistics* runs again without writing them, and a *random* one
with the generator put back to where it was. Of whatever is not named here nothing is known, and it is never run again.

Of what autograd keeps, backward often needs less than the numbers: ReLU only where the output is above zero, a pool
only the shape of its input, a convolution whose weights are frozen nothing of its input but the shape.
"""

from __future__ import annotations

from typing import Literal

from outcore.ops.registry import Facet, find, kinds

__all__ = ["AGAIN", "FOLDING", "FOLDS", "NEEDED", "Again", "Need", "again", "need"]

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

NEEDED: Facet[Need] = Facet("backward reads", "what backward needs of the tensor it keeps, if less than its numbers")
NEEDED.add("sign", "relu")
NEEDED.add("shape", *(f"{pool}{n}d" for pool in ("max_pool", "avg_pool", "adaptive_avg_pool") for n in (2, 3)))


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
