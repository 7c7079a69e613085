"""A map as a pyramid: tiled TIFF with levels that halve, as OpenSlide, QuPath and tifffile open it.

Each level is made from the one before while that is written, and kept in a file of its own
(`outcore.infer.disk_array`): the full map is read once, however many levels there are. Classes are taken from every
second pixel, so they stay classes; numbers are the mean of four. Bytes carry a palette (`outcore.infer.palette`). The
resolution is written where the slide says it, so that viewers lay the map over the slide in the right size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outcore.errors import MissingPackageError
from outcore.infer.disk_array import DiskArray
from outcore.infer.palette import tiff_palette

__all__ = ["SOFTWARE", "write_pyramid"]

Pixels = np.ndarray[Any, Any]

_TILE = 512
SOFTWARE = "outcore infer"
"""Written into every map, near its beginning: a folder's maps are not taken for slides."""


def write_pyramid(
    path: Path,
    pixels: Pixels | DiskArray,
    *,
    scratch: Path,
    colours: Pixels | None = None,
    mean: bool = False,
    microns_per_pixel: float | None = None,
) -> None:
    """Write a map of (y, x) or (channels, y, x) with all its levels.

    Args:
        path: the file.
        pixels: the map, in memory or in a file.
        scratch: a folder for the coarser levels while they are made.
        colours: what each number is shown as, for bytes.
        mean: whether a coarser pixel is the mean of four, or one of them.
        microns_per_pixel: of the map.
    """
    try:
        import tifffile
    except ImportError:
        raise MissingPackageError(
            f"writing {path} needs tifffile; install it with: pip install 'outcore[slides]'"
        ) from None
    if pixels.ndim == 3 and pixels.shape[0] == 1:  # planes of one are no planes to a TIFF
        pixels = pixels.plane() if isinstance(pixels, DiskArray) else pixels[0]
    shown: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate" if pixels.ndim == 3 else None}
    if colours is not None and pixels.ndim == 2 and pixels.dtype == np.uint8:
        shown = {"photometric": "palette", "colormap": tiff_palette(colours)}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for number in itertools.count():
            microns = None if microns_per_pixel is None else microns_per_pixel * 2**number
            if microns is not None:
                shown |= {"resolution": (10000 / microns,) * 2, "resolutionunit": "CENTIMETER"}
            last = max(pixels.shape[-2:]) <= 2 * _TILE
            coarser = None if last else _coarser_level(scratch / f"level{number + 1}.npy", pixels)
            file.write(
                _tiles(pixels, coarser, mean),
                shape=pixels.shape,
                dtype=pixels.dtype,
                tile=(_TILE, _TILE),
                compression="adobe_deflate",
                subfiletype=1 if number else 0,
                metadata=None,
                software=SOFTWARE,
                **shown,
            )
            if coarser is None:
                return
            pixels = coarser


def _coarser_level(path: Path, pixels: Pixels | DiskArray) -> DiskArray:
    """A file for the next level, empty."""
    half = (*pixels.shape[:-2], *(-(-n // 2) for n in pixels.shape[-2:]))
    return DiskArray.create(path, half, pixels.dtype)


def _tiles(pixels: Pixels | DiskArray, coarser: DiskArray | None, mean: bool) -> Iterator[Pixels]:
    """The tiles of a level in the order of the file, the last ones filled up with zeros; fills the next level."""
    planes: list[tuple[int, ...]] = [()] if pixels.ndim == 2 else [(plane,) for plane in range(pixels.shape[0])]
    for plane in planes:
        for y, x in itertools.product(*(range(0, n, _TILE) for n in pixels.shape[-2:])):
            place: Any = (*plane, slice(y, y + _TILE), slice(x, x + _TILE))
            part = np.ascontiguousarray(pixels[place])
            if coarser is not None:
                half = _halved(part, mean)
                rows, columns = (slice(at // 2, at // 2 + n) for at, n in zip((y, x), half.shape, strict=True))
                coarser[(*plane, rows, columns)] = half
            yield np.pad(part, [(0, _TILE - n) for n in part.shape]) if part.shape != (_TILE, _TILE) else part


def _halved(part: Pixels, mean: bool) -> Pixels:
    """Half the size in both directions; the last row and column stand for themselves.

    >>> _halved(np.array([[0, 4, 8], [0, 4, 8]], np.uint8), mean=True).tolist()
    [[2, 8]]
    """
    if not mean:
        return part[::2, ::2]
    full = np.pad(part, [(0, n % 2) for n in part.shape], mode="edge").astype(np.float32)
    half = (full[::2, ::2] + full[1::2, ::2] + full[::2, 1::2] + full[1::2, 1::2]) / 4
    return half.round().astype(part.dtype) if part.dtype.kind in "ui" else half.astype(part.dtype)
