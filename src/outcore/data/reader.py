"""The interface of a file format from which slides can be read: levels, each a grid of tiles.

Every format is brought to one form: levels of decreasing size, each cut into equal tiles (the last of a row may be cut
off), each tile an array of channels first. Everything else (regions, caching, damaged tiles, resampling) is in
`outcore.data.slide` and is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PyramidLevel:
    """One magnification: its size, the size of its tiles, and how much smaller than the finest level it is."""

    size: tuple[int, ...]
    """Height and width, or depth, height and width."""
    tile: tuple[int, ...]
    downsample: float = 1.0

    @property
    def grid(self) -> tuple[int, ...]:
        """How many tiles in each direction."""
        return tuple(-(-size // tile) for size, tile in zip(self.size, self.tile, strict=True))


@dataclass(frozen=True)
class FileLayout:
    """What a file holds, known after opening it."""

    levels: tuple[PyramidLevel, ...]
    channels: int
    dtype: np.dtype[Any]
    microns_per_pixel: float | None = None
    """Of the finest level."""
    format: str = ""


class Reader(Protocol):
    """An open file."""

    @property
    def layout(self) -> FileLayout:
        """Its levels."""

    @property
    def decoded(self) -> bool:
        """Whether a tile costs decoding, and so is worth keeping."""

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """The pixels of a tile, channels first; None where nothing was scanned. May be called from any thread."""
