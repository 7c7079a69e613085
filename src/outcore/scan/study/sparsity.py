"""Where the Jacobian of a layer can be non-zero, one dimension at a time.

Convolutions, pooling and element-wise functions treat channels, rows and columns separately: output (c, y, x)
depends on input (c', y', x') exactly when c on c', y on y' and x on x'. So the pattern of a Jacobian with
billions of places is kept as one small boolean matrix per dimension, whose numbers of non-zeros multiply, and
the pattern of a product is the product of the small patterns. Counts of non-zeros and of multiplications are
exact for these layers.

Not every place of a pattern holds a non-zero: a max-pool picks one input of its window, a pruned convolution
has few weights. `fill` is the expected share that does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import sparse

from outcore.ops.registry import Facet, kinds, names

Form = Literal["elementwise", "reshape", "channel", "window", "adaptive window", "dense"]
JACOBIAN: Facet[Form] = Facet("jacobian", "where its Jacobian can be non-zero")
JACOBIAN.add("elementwise", *kinds("activation", "activation with a weight", "identity", "sum", "copy", "cast"))
JACOBIAN.add("elementwise", *kinds("dropout", "alpha dropout"), "mul", "div", "neg")
JACOBIAN.add("reshape", "flatten", "view", "reshape", "squeeze", "unsqueeze")
JACOBIAN.add("channel", "batch_norm")
JACOBIAN.add("window", *kinds("convolution", "max pool", "average pool"))
JACOBIAN.add("adaptive window", *kinds("adaptive average pool", "adaptive max pool"))
JACOBIAN.add("dense", "linear")


@dataclass(frozen=True, slots=True)
class JacobianPattern:
    """Non-zeros of a Jacobian: one boolean matrix (output places by input places) per dimension."""

    dims: tuple[sparse.csr_matrix, ...]
    fill: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return math.prod(d.shape[0] for d in self.dims), math.prod(d.shape[1] for d in self.dims)

    @property
    def places(self) -> int:
        """Places that can be non-zero."""
        return math.prod(d.nnz for d in self.dims)

    @property
    def nonzeros(self) -> float:
        """Non-zeros to be expected."""
        return self.places * self.fill

    @property
    def sparsity(self) -> float:
        """Share of zeros."""
        rows, columns = self.shape
        return 1 - self.nonzeros / (rows * columns)

    def after(self, other: JacobianPattern) -> tuple[JacobianPattern, float]:
        """The pattern of this Jacobian times that of an earlier layer, and the FLOPs of the sparse
        product."""
        pairs = math.prod(_multiplications(a, b) for a, b in zip(self.dims, other.dims, strict=True))
        dims = tuple(_boolean(a @ b) for a, b in zip(self.dims, other.dims, strict=True))
        hit = self.fill * other.fill
        paths = pairs / max(1, math.prod(d.nnz for d in dims))
        fill = 1.0 if hit == 1 else 1 - (1 - hit) ** paths
        return JacobianPattern(dims, fill), 2.0 * pairs * hit

    def joined(self, other: JacobianPattern) -> JacobianPattern:
        """The pattern of the sum of two Jacobians."""
        dims = tuple(_boolean(a + b) for a, b in zip(self.dims, other.dims, strict=True))
        return JacobianPattern(dims, max(self.fill, other.fill))


def _boolean(matrix: sparse.spmatrix) -> sparse.csr_matrix:
    found = sparse.csr_matrix(matrix)
    found.data = np.ones(found.nnz, dtype=np.int64)
    return found


def _multiplications(left: sparse.csr_matrix, right: sparse.csr_matrix) -> int:
    """Multiplications of a sparse product: for every entry of the left, the length of the row it meets."""
    return int(np.diff(right.indptr)[left.indices].sum())


def identity(shape: Sequence[int]) -> JacobianPattern:
    """Each output depends on the same place of the input."""
    return JacobianPattern(tuple(sparse.identity(n, dtype=np.int64, format="csr") for n in shape))


def dense(out: Sequence[int], given: Sequence[int]) -> JacobianPattern:
    """Each output depends on each input."""
    return JacobianPattern(tuple(_full(a, b) for a, b in zip(out, given, strict=True)))


def _full(rows: int, columns: int) -> sparse.csr_matrix:
    return sparse.csr_matrix(np.ones((rows, columns), dtype=np.int64))


def _window(rows: int, columns: int, size: int, stride: int, padding: int, dilation: int) -> sparse.csr_matrix:
    """Output place i sees the inputs ``i * stride - padding + (0 … size - 1) * dilation`` that exist."""
    out = np.repeat(np.arange(rows), size)
    seen = out * stride - padding + np.tile(np.arange(size) * dilation, rows)
    real = (seen >= 0) & (seen < columns)
    ones = np.ones(int(real.sum()), dtype=np.int64)
    return sparse.csr_matrix((ones, (out[real], seen[real])), shape=(rows, columns))


def of_layer(
    kind: str, detail: str, given: Sequence[int], out: Sequence[int], *, training: bool, density: float = 1.0
) -> JacobianPattern | None:
    """The pattern of a layer from its description, or none for one that is not known.

    Args:
        kind: name of the layer or function: ``Conv2d``, ``relu``.
        detail: what ``print(module)`` shows between the brackets.
        given: shape of the input of one sample, channels first.
        out: shape of the output.
        training: batch normalisation sees the whole channel in training.
        density: share of the weights that are not pruned.
    """
    match JACOBIAN.find(kind):
        case "elementwise" if tuple(given) == tuple(out):
            return identity(out)
        case "channel" if not training:
            return identity(out)
        case "channel":
            return JacobianPattern((identity(out[:1]).dims[0], *(_full(n, n) for n in out[1:])))
        case "adaptive window":
            spans = (_spans(a, b) for a, b in zip(out[1:], given[1:], strict=True))
            return JacobianPattern((identity(out[:1]).dims[0], *spans), _picked(kind, given, out))
        case "window":
            return _windowed(kind, detail, given, out, density)
        case "dense":
            return JacobianPattern(dense(out, given).dims, density)
    return None


def _windowed(kind: str, detail: str, given: Sequence[int], out: Sequence[int], density: float) -> JacobianPattern:
    dims, convolves = len(out) - 1, kind in names(*kinds("convolution"))
    first = detail.split(",")[0] if "kernel_size" not in detail and not convolves else ""
    window = _numbers(detail, "kernel_size", first or "1", dims)
    stride = _numbers(detail, "stride", "1" if convolves else ",".join(map(str, window)), dims)
    dilation = _numbers(detail, "dilation", "1", dims)
    if "padding=same" in detail or "padding='same'" in detail:
        padding = tuple(d * (k - 1) // 2 for k, d in zip(window, dilation, strict=True))
    else:
        padding = _numbers(detail, "padding", "0", dims)
    sizes = zip(out[1:], given[1:], window, stride, padding, dilation, strict=True)
    spatial = tuple(_window(*size) for size in sizes)
    if not convolves:
        fill = 1 / math.prod(window) if kind in names(*kinds("max pool")) else 1.0
        return JacobianPattern((identity(out[:1]).dims[0], *spatial), fill)
    groups = _numbers(detail, "groups", "1", 1)[0]
    block = np.ones((out[0] // groups, given[0] // groups), dtype=np.int64)
    return JacobianPattern((sparse.block_diag([block] * groups, format="csr"), *spatial), density)


def _numbers(detail: str, name: str, default: str, dims: int) -> tuple[int, ...]:
    """The numbers of an argument: ``stride=(2, 2)`` or ``stride=2``."""
    match = re.search(rf"\b{name}=(\([^)]*\)|\[[^\]]*\]|\d+)", detail)
    found = [int(n) for n in re.findall(r"\d+", match[1] if match else default)]
    return tuple(found * dims) if len(found) == 1 else tuple(found)


def _spans(rows: int, columns: int) -> sparse.csr_matrix:
    """Adaptive pooling: output place i sees inputs from ``floor(i n / m)`` to ``ceil((i + 1) n / m)``."""
    out = np.zeros((rows, columns), dtype=np.int64)
    for i in range(rows):
        out[i, i * columns // rows : -(-(i + 1) * columns // rows)] = 1
    return sparse.csr_matrix(out)


def _picked(kind: str, given: Sequence[int], out: Sequence[int]) -> float:
    return math.prod(out) / math.prod(given) if kind in names(*kinds("adaptive max pool")) else 1.0
