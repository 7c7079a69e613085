"""Arrays and ordinary images: NumPy files (mapped, not loaded), tensors, PNG and JPEG through Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outcore.data.reader import Layout, Level, Pixels
from outcore.errors import DataError, MissingPackageError

__all__ = ["ArrayReader", "load_array", "load_image"]

_TILE = 1024


class ArrayReader:
    """An array of channels, then two or three dimensions; of two dimensions it is one channel."""

    decoded = False

    def __init__(self, array: Pixels, name: str = "array") -> None:
        if array.ndim not in (2, 3, 4):
            raise DataError(f"{name} has shape {array.shape}; an image has (y, x), (c, y, x) or (c, z, y, x)")
        self._array = array[None] if array.ndim == 2 else array
        size = self._array.shape[1:]
        level = Level(size, tuple(min(s, _TILE if len(size) == 2 else 128) for s in size))
        self.layout = Layout((level,), self._array.shape[0], array.dtype, None, "array")

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """A view of the array."""
        tile = self.layout.levels[level].tile
        return self._array[(slice(None), *(slice(i * t, (i + 1) * t) for i, t in zip(index, tile, strict=True)))]


def load_array(path: Path) -> Pixels:
    """A NumPy file as a memory map; files that would run code are refused."""
    try:
        mapped: Pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a NumPy array: {error}") from error
    return mapped


def load_image(path: Path) -> Pixels:
    """An ordinary image, whole, channels first."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError(
            f"reading {path} needs Pillow; install it with: pip install 'outcore[slides]'"
        ) from None
    try:
        with Image.open(path) as image:
            mode = "L" if image.mode in ("1", "L") else "RGB"
            pixels = np.asarray(image.convert(mode))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
