"""Zarr arrays and OME-NGFF images (OME-Zarr 0.4 and 0.5), in two or three dimensions.

A plain array is read as ``(y, x)``, ``(c, y, x)`` or ``(c, z, y, x)``; an image says its axes itself. A chunk that was
never written has the array's fill value, as Zarr defines.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from outcore.data.reader import Layout, Level, Pixels
from outcore.errors import DataError

__all__ = ["ZarrReader"]

_PLAIN = {2: "yx", 3: "cyx", 4: "czyx"}
_SMALLEST = 256
"""Chunks smaller than this are read several at a time."""


class ZarrReader:
    """A Zarr array or an OME-NGFF pyramid."""

    decoded = True

    def __init__(self, path: Path) -> None:
        import zarr

        try:
            found: Any = zarr.open(str(path), mode="r")
        except Exception as error:
            raise DataError(f"{path} cannot be opened as Zarr: {error}") from error
        attributes = dict(found.attrs)
        attributes = attributes.get("ome", attributes)
        self._microns: float | None = None
        if isinstance(found, zarr.Array):
            self._arrays, self._axes = [found], _PLAIN.get(found.ndim, "")
        elif attributes.get("multiscales"):
            scales = attributes["multiscales"][0]
            self._arrays = [found[dataset["path"]] for dataset in scales["datasets"]]
            self._axes = "".join(axis["name"] for axis in scales["axes"])
            self._microns = _microns(scales, self._axes)
        else:
            raise DataError(f"{path} is a Zarr group without multiscales; name one of its arrays: {sorted(found)[:5]}")
        self.layout = self._layout(path)

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """The pixels of a tile, channels first."""
        here = self.layout.levels[level]
        spatial = iter(zip(index, here.tile, here.size, strict=True))
        box: list[Any] = []
        for axis in self._axes:
            if axis in "zyx":
                i, tile, size = next(spatial)
                box.append(slice(i * tile, min((i + 1) * tile, size)))
            else:
                box.append(slice(None) if axis == "c" else 0)
        pixels = np.asarray(self._arrays[level][tuple(box)])
        return pixels if "c" in self._axes else pixels[None]

    def _layout(self, path: Path) -> Layout:
        first = self._arrays[0]
        sizes = dict(zip(self._axes, first.shape, strict=False))
        if not self._axes.endswith("yx") or sizes.get("t", 1) != 1 or len(self._axes) != first.ndim:
            raise DataError(f"{path} has shape {first.shape} and axes {self._axes!r}; an image ends in y, x or z, y, x")
        dims = [i for i, axis in enumerate(self._axes) if axis in "zyx"]
        levels = []
        for array in self._arrays:
            size = tuple(array.shape[i] for i in dims)
            tile = [array.chunks[i] for i in dims]
            tile = [chunk * max(1, _SMALLEST // chunk) if len(dims) == 2 else chunk for chunk in tile]
            levels.append(Level(size, tuple(tile), first.shape[-2] / array.shape[-2]))
        return Layout(tuple(levels), sizes.get("c", 1), np.dtype(first.dtype), self._microns, "zarr")


def _microns(scales: dict[str, Any], axes: str) -> float | None:
    """Microns per pixel in x, where the scale and its unit are given."""
    unit = scales["axes"][axes.index("x")].get("unit")
    factor = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}.get(unit)
    datasets = scales["datasets"][0].get("coordinateTransformations", [])
    for step in itertools.chain(datasets, scales.get("coordinateTransformations", [])):
        if step.get("type") == "scale" and factor:
            return float(step["scale"][axes.index("x")]) * factor
    return None
