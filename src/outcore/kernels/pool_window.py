"""The window of a max pool, as kernels and their callers describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outcore.ops.recompute_encode import PIXELS

NOWHERE = PIXELS
"""The position of the image's first pixel in windows that it does not lie in; others are smaller."""


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The window of a pool, per dimension of the image."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    image: tuple[int, ...]
    """Size of the pool's input."""

    @property
    def fits(self) -> bool:
        """Whether a position in the window is one byte."""
        return math.prod(self.kernel) <= PIXELS
