"""The most memory that a file may make the process allocate.

A file of a few bytes can claim any size: a million pixels a side in one tile, a chunk of a terabyte. Whatever a file
claims is checked against these limits before memory is allocated for it. `limits.at_most` lowers them for a while, to
what a budget allows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from outcore.data.reader import FileLayout
from outcore.errors import DataError
from outcore.machine.units import format_bytes

_LARGEST_SIDE = 1 << 31
_MOST_TILES = 50_000_000
"""The most tiles of a file; two bytes are kept for each."""
_MOST_CHANNELS = 65_536
_MOST_LEVELS = 64


@dataclass
class Limits:
    """The most that one piece of a file may take when it is decoded: a tile, a chunk, an image without tiles."""

    piece_bytes: int = 1 << 30

    @contextlib.contextmanager
    def at_most(self, nbytes: int) -> Iterator[None]:
        """Lower the limit inside of a ``with`` statement."""
        before = self.piece_bytes
        self.piece_bytes = min(before, nbytes)
        try:
            yield
        finally:
            self.piece_bytes = before

    def check_piece(self, name: str, what: str, nbytes: int) -> None:
        """Refuse a piece that is larger.

        >>> Limits(100).check_piece("a.tif", "a tile of 9 x 9 px", 243)
        Traceback (most recent call last):
        outcore.errors.DataError: a.tif: a tile of 9 x 9 px takes 243 B, the limit is 100 B; write it again with \
smaller tiles, or allow more memory
        """
        if nbytes > self.piece_bytes:
            raise DataError(
                f"{name}: {what} takes {format_bytes(nbytes)}, the limit is {format_bytes(self.piece_bytes)}; write it "
                "again with smaller tiles, or allow more memory"
            )


limits = Limits()
"""The limits of this process."""


def check_layout(name: str, layout: FileLayout) -> None:
    """Refuse what cannot be an image, or is larger than the limits.

    Raises:
        DataError: says which number is wrong.
    """
    if not 1 <= len(layout.levels) <= _MOST_LEVELS:
        raise DataError(f"{name} has {len(layout.levels)} levels; an image has 1 to {_MOST_LEVELS}")
    if not 1 <= layout.channels <= _MOST_CHANNELS:
        raise DataError(f"{name} has {layout.channels} channels; an image has 1 to {_MOST_CHANNELS:,}")
    if layout.dtype is None or layout.dtype.kind not in "buif" or not _known(layout.dtype):
        raise DataError(f"{name} holds numbers of type {layout.dtype}; an image has whole or floating-point numbers")
    rank = len(layout.levels[0].size)
    for number, level in enumerate(layout.levels):
        size, tile = (" x ".join(map(str, n[::-1])) for n in (level.size, level.tile))
        if len(level.size) != rank or len(level.tile) != rank or not all(0 < n < _LARGEST_SIDE for n in level.size):
            raise DataError(f"{name} has a level {number} of {size} px; every side has 1 to {_LARGEST_SIDE:,}")
        if not all(0 < n < _LARGEST_SIDE for n in level.tile) or not 0 < level.downsample < math.inf:
            raise DataError(f"{name} has tiles of {tile} px in level {number}; it is damaged")
        if layout.format in ("array", "image"):  # mapped, never decoded
            continue
        if math.prod(level.grid) > _MOST_TILES:
            raise DataError(f"{name} has {math.prod(level.grid):,} tiles of {tile} px; at most are {_MOST_TILES:,}")
        pixels = math.prod(level.tile) * layout.channels * layout.dtype.itemsize
        limits.check_piece(name, f"a tile of {tile} px", pixels)


def _known(dtype: np.dtype[np.generic]) -> bool:
    """Whether torch has the type."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True
