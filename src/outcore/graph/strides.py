"""How tensors lie in memory, told from their shape and strides."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions, the memory format of images whose channels lie innermost."""


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


def has_known_format(x: torch.Tensor) -> bool:
    """Whether a tensor lies in memory without gaps, contiguous or with channels last."""
    formats = [torch.contiguous_format, *([CHANNELS_LAST[x.dim()]] if x.dim() in CHANNELS_LAST else [])]
    return any(x.is_contiguous(memory_format=f) for f in formats)


def known_format(x: torch.Tensor) -> torch.memory_format:
    """The memory format of a tensor that has a known one."""
    return torch.contiguous_format if x.is_contiguous() else CHANNELS_LAST[x.dim()]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a tensor in row-major order."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
