"""How tensors lie in memory, told from their shape and strides."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def same_layout(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether strides give a tensor the same layout; the stride of a dimension of one element does not matter."""
    return all(n == 1 or a == b for n, a, b in zip(shape, first, second, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory, in whatever order of its dimensions."""
    expected = 1
    for step, length in sorted((st, n) for n, st in zip(shape, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a tensor in row-major order."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
