"""The tiles of synthetic tissue: a few of each kind, drawn once.

Flat colours and hard edges on purpose: such tiles compress tenfold without loss, so a slide of ten thousand million
pixels is a file of moderate size whose every pixel is known. Cells lie whole inside their tile, so any tile can lie
beside any other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

KINDS = ("round", "tall", "stroma")
"""Two kinds of tissue that labels depend on, and one that none does."""
VARIANTS = 16
_CELL = 32
_CYTOPLASM = ((236, 186, 214), (206, 172, 226), (240, 214, 222))
_NUCLEUS = ((118, 66, 150), (92, 70, 168), (214, 150, 178))
_AXES = ((7.5, 7.5), (12.0, 4.5), (2.5, 13.0))
"""Half the height and width of a nucleus, in pixels."""

Pixels = np.ndarray[Any, Any]


@lru_cache(maxsize=8)
def patterns(dims: int, tile: int, downsample: int = 1) -> Pixels:
    """All tiles of all kinds: ``(kinds * variants, tile, tile, 3)``, or one channel in three dimensions.

    A tile of a coarser level is the mean over the pixels of the finest one.
    """
    if downsample == 1:
        return np.stack([_draw(dims, tile, kind, v) for kind in range(len(KINDS)) for v in range(VARIANTS)])
    finest = patterns(dims, tile)
    small = tile // downsample
    split = finest.reshape(len(finest), *(n for _ in range(dims) for n in (small, downsample)), finest.shape[-1])
    mean: Pixels = split.mean(axis=tuple(range(2, 2 + 2 * dims, 2)), dtype=np.float64)
    return np.floor(mean + 0.5).astype(np.uint8)


def _draw(dims: int, tile: int, kind: int, variant: int) -> Pixels:
    """One tile: a nucleus somewhere in every cell of a grid."""
    random = np.random.default_rng([dims, tile, kind, variant])
    cell = min(_CELL, tile)
    cells = (tile // cell,) * dims
    axes = [_AXES[kind][min(i, 1)] * cell / _CELL for i in range(dims)]
    # The centre keeps the nucleus inside its cell.
    room = np.array([max(0.0, cell / 2 - axis - 1) for axis in axes])
    centre = cell / 2 + random.uniform(-1, 1, (*cells, dims)) * room
    shade = random.integers(-2, 3, cells) * 8
    # Cells first, pixels of a cell last: each is compared with its own centre.
    local = np.arange(cell) + 0.5
    distance = np.zeros((*cells, *(cell for _ in range(dims))))
    for i in range(dims):
        offset = (local - centre[..., i, None]) / axes[i]
        distance += np.expand_dims(offset**2, tuple(dims + j for j in range(dims) if j != i))
    nucleus = (distance <= 1)[..., None]
    tint = np.expand_dims(shade, tuple(range(dims, 2 * dims + 1)))
    if dims == 3:
        drawn = np.where(nucleus, 210 - 60 * kind + tint, 60 + 20 * kind)
    else:
        drawn = np.where(nucleus, np.asarray(_NUCLEUS[kind]) + tint, np.asarray(_CYTOPLASM[kind]))
    order = [axis for i in range(dims) for axis in (i, dims + i)]
    return drawn.astype(np.uint8).transpose(*order, 2 * dims).reshape(*(tile,) * dims, -1)
