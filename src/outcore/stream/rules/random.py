"""Random numbers that are a function of where they are used.

A tile is computed more than once (two passes, overlapping halos) and in any order; a mask must be the same each time.
So no generator is advanced: the number at a position is a hash of (seed, call, position), mixed as in Steele, Lea and
Flood's SplitMix (OOPSLA 2014). The masks therefore do not depend on the tiling or on the device; they are *not* those
that torch's own generator would give, which depend on the order of drawing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from outcore.ops.region import Region, sizes

__all__ = ["keep_mask"]

_MASK = (1 << 32) - 1


def keep_mask(
    region: Region, shape: tuple[int, ...], rate: float, key: tuple[Any, ...], device: torch.device
) -> torch.Tensor:
    """Which elements of a region are kept, each with chance 1 - rate."""
    start = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
    state = torch.full((1,) * len(shape), start, dtype=torch.int64, device=device)
    for dim, (lo, hi) in enumerate(region):
        view = [1] * len(shape)
        view[dim] = hi - lo
        index = torch.arange(lo, hi, dtype=torch.int64, device=device).view(view)
        state = _mix((state * 0x9E3779B1 + index + 1) & _MASK)
    return (_mix(state) >= int(rate * 2**32)).expand(sizes(region))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Spread every bit over all 32."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
