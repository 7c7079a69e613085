"""The formats of slide scanners (SVS, NDPI, MRXS, SCN, BIF, DICOM, ...), through OpenSlide.

OpenSlide gives premultiplied RGBA; what was never scanned is transparent and becomes white, as glass is. Its handle may
be shared among threads.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from outcore.data.reader import FileLayout, Pixels, PyramidLevel
from outcore.errors import DataError

_TILE = 1024


class OpenSlideReader:
    """A slide as a scanner wrote it: three channels of bytes."""

    decoded = True

    def __init__(self, path: Path) -> None:
        import openslide

        try:
            self._slide = openslide.OpenSlide(str(path))
        except (openslide.OpenSlideError, OSError, ValueError) as error:
            raise DataError(f"{path} cannot be opened as a slide: {error}; is it complete?") from error
        properties = self._slide.properties
        microns = _number(properties.get(openslide.PROPERTY_NAME_MPP_X))
        levels = [
            PyramidLevel((height, width), (_TILE, _TILE), float(downsample))
            for (width, height), downsample in zip(
                self._slide.level_dimensions, self._slide.level_downsamples, strict=True
            )
        ]
        self.layout = FileLayout(
            tuple(levels),
            3,
            np.dtype(np.uint8),
            microns,
            properties.get(openslide.PROPERTY_NAME_VENDOR, "openslide"),
        )

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """The pixels of a tile; None where all of it is transparent."""
        here = self.layout.levels[level]
        top, left = index[0] * _TILE, index[1] * _TILE
        height, width = min(_TILE, here.size[0] - top), min(_TILE, here.size[1] - left)
        # OpenSlide wants the corner in pixels of the finest level.
        corner = (round(left * here.downsample), round(top * here.downsample))
        rgba = np.asarray(self._slide.read_region(corner, level, (width, height)))
        opacity = rgba[..., 3]
        if not opacity.any():
            return None
        pixels = rgba[..., :3]
        if (opacity != 255).any():
            share = opacity[..., None].astype(np.uint16)
            pixels = ((pixels * share + 255 * (255 - share)) // 255).astype(np.uint8)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _number(text: str | None) -> float | None:
    """A number that a scanner wrote, where it is one."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
