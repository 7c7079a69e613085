"""Arrays and ordinary images: NumPy files (mapped, not loaded), tensors, PNG and JPEG through Pillow.

What a file claims is checked before it is decoded: an image of a few bytes may say that it has a million pixels a side.
Numbers of more than eight bits stay what they are.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from outcore.data.limits import limits
from outcore.data.reader import FileLayout, Pixels, PyramidLevel
from outcore.errors import DataError, MissingPackageError

_TILE = 1024


class ArrayReader:
    """An array of channels, then two or three dimensions; of two dimensions it is one channel."""

    decoded = False

    def __init__(self, array: Pixels, name: str = "array", form: str = "array") -> None:
        if array.ndim not in (2, 3, 4):
            raise DataError(f"{name} has shape {array.shape}; an image has (y, x), (c, y, x) or (c, z, y, x)")
        self._array = array[None] if array.ndim == 2 else array
        size = self._array.shape[1:]
        level = PyramidLevel(size, tuple(min(s, _TILE if len(size) == 2 else 128) for s in size))
        # Bytes in another order are turned when they are read.
        self.layout = FileLayout((level,), self._array.shape[0], array.dtype.newbyteorder("="), None, form)

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """A view of the array."""
        tile = self.layout.levels[level].tile
        return self._array[(slice(None), *(slice(i * t, (i + 1) * t) for i, t in zip(index, tile, strict=True)))]


def load_array(path: Path) -> Pixels:
    """A NumPy file as a memory map; files that would run code are refused."""
    try:
        mapped: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the header is a Python literal, and fails in as many ways
        raise DataError(f"{path} cannot be read as a NumPy array: {_said(error)}") from error
    if not isinstance(mapped, np.ndarray):
        raise DataError(f"{path} is an archive of arrays; save one of them with numpy.save")
    return mapped


def _said(error: Exception) -> str:
    """The first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0]


def load_image(path: Path) -> Pixels:
    """An ordinary image, whole, channels first."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingPackageError(
            f"reading {path} needs Pillow; install it with: pip install 'outcore[slides]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limits say it better
            with Image.open(path) as image:
                pixels = _decoded(path, image)
    except DataError:
        raise
    except Exception as error:  # decoders of broken files fail in as many ways as there are
        raise DataError(f"{path} cannot be read as an image: {_said(error)}") from error
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _decoded(path: Path, image: Any) -> Pixels:
    """The pixels of an opened image, after a look at its size."""
    width, height = image.size
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    mode = None if deep else "L" if image.mode in ("1", "L") else "RGB"
    # Decoded once in its own mode, and once more in the one that is wanted.
    limits.check_piece(
        str(path), f"an image of {width} x {height} px", 2 * width * height * (3 if mode == "RGB" else 4)
    )
    return np.asarray(image if mode is None else image.convert(mode))
