"""Which tiles of a file are of one colour, as far as they were decoded.

Most of a slide is glass, or was never scanned. A tile of one colour need be decoded once: its colour describes all of
it. What is known is one small number for each tile of the file, two bytes, so it can be kept for all slides of a data
set: an epoch later the glass is not read again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from outcore.data.reader import FileLayout, Pixels

Colour = tuple[int | float, ...]
"""One number for each channel."""

_MIXED = -1
_MOST = 32_000
"""The number of colours that are distinguished; tiles of further ones count as mixed."""


class Colours:
    """The colours of a file's tiles.

    >>> from outcore.data.reader import PyramidLevel
    >>> colours = Colours(FileLayout((PyramidLevel((8, 8), (4, 4)),), 1, np.dtype(np.uint8)))
    >>> for place in ((0, 0), (0, 1)):
    ...     _ = colours.note(0, place, np.full((1, 4, 4), 7, np.uint8))
    >>> colours.of(0, [range(1), range(2)]), colours.of(0, [range(2), range(2)])
    ((7,), None)
    """

    def __init__(self, layout: FileLayout) -> None:
        self._numbers = [np.zeros(level.grid, np.int16) for level in layout.levels]
        """For each tile the number of its colour; 0 where it was not decoded."""
        self._known: list[Colour] = []
        self._by_colour: dict[Colour, int] = {}
        self._last: tuple[Pixels | None, Colour | None] = None, None
        """A reader may give the same array again."""
        self._lock = threading.Lock()

    def note(self, level: int, index: tuple[int, ...], pixels: Pixels) -> Colour | None:
        """Note the colour of a tile; returns it, or None if it has several."""
        before, colour = self._last
        if pixels is before and colour is not None:
            self._numbers[level][index] = self._number(colour)
            return colour
        flat = pixels.reshape(pixels.shape[0], -1)
        first = flat[:, 0]
        # Channel by channel: the comparison takes memory, too.
        alike = ((plane == n).all() for plane, n in zip(flat, first, strict=True))
        if not np.array_equal(first, flat[:, -1]) or not all(alike):
            self._numbers[level][index] = _MIXED
            return None
        colour = tuple(first.tolist())
        self._last = pixels, colour
        self._numbers[level][index] = self._number(colour)
        return colour

    def of(self, level: int, places: Sequence[range]) -> Colour | None:
        """The one colour of a box of tiles; None if there are several, or one of the tiles was not decoded."""
        numbers = self._numbers[level][tuple(slice(p.start, p.stop) for p in places)]
        first = int(numbers.flat[0]) if numbers.size else 0
        return self._known[first - 1] if first > 0 and bool((numbers == first).all()) else None

    def _number(self, colour: Colour) -> int:
        with self._lock:
            if colour not in self._by_colour and len(self._known) < _MOST:
                self._known.append(colour)
                self._by_colour[colour] = len(self._known)
            return self._by_colour.get(colour, _MIXED)
