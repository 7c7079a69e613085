"""Zarr arrays and OME-NGFF images (OME-Zarr 0.4 and 0.5), in two or three dimensions.

A plain array is read as ``(y, x)``, ``(c, y, x)`` or ``(c, z, y, x)``; an image says its axes itself. A chunk that was
never written has the array's fill value, as Zarr defines. The metadata is anyone's JSON: every value is asked for with
the type it must have (`_need`), and what is wrong is named with its place in the document. The pixels of an image
lie inside of its folder: a path that leads out of it is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from outcore.data.limits import limits
from outcore.data.reader import FileLayout, Pixels, PyramidLevel
from outcore.errors import DataError

Kind = TypeVar("Kind")

_PLAIN = {2: "yx", 3: "cyx", 4: "czyx"}
_SMALLEST = 256
"""Chunks smaller than this are read several at a time."""
_WORDS = {dict: "an object", list: "a list", str: "a word", float: "a number"}
_MICRONS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}


class ZarrReader:
    """A Zarr array or an OME-NGFF pyramid."""

    decoded = True

    def __init__(self, path: Path) -> None:
        import zarr

        self._name = str(path)
        try:
            found: Any = zarr.open(str(path), mode="r")
            attributes = dict(found.attrs)
        except Exception as error:
            raise DataError(f"{path} cannot be opened as Zarr: {_said(error)}") from error
        self._microns: float | None = None
        if isinstance(found, zarr.Array):
            self._arrays, self._axes = [found], _PLAIN.get(found.ndim, "")
        else:
            self._open_image(found, attributes)
        self.layout = self._layout()

    def _open_image(self, group: Any, attributes: Mapping[str, Any]) -> None:
        """Take the levels and axes from the metadata of an image."""
        where = "ome." if "ome" in attributes else ""
        image = self._need(attributes, "ome", dict) if where else attributes
        if "multiscales" not in image:
            raise DataError(
                f"{self._name} is a Zarr group without multiscales; name one of its arrays: {_members(group)}"
            )
        every = self._need(image, "multiscales", list, where)
        scales = self._need(every, 0, dict, f"{where}multiscales")
        inside = f"{where}multiscales[0]."
        axes, datasets = (self._need(scales, key, list, inside) for key in ("axes", "datasets"))
        self._axes = "".join(self._axis(axes, n, f"{inside}axes") for n in range(len(axes)))
        levels = [self._need(datasets, n, dict, f"{inside}datasets") for n in range(len(datasets))]
        paths = [self._need(level, "path", str, f"{inside}datasets[{n}].") for n, level in enumerate(levels)]
        self._arrays = [self._array(group, name) for name in paths]
        if not self._arrays:
            raise DataError(f"{self._name}: {inside}datasets is empty; an image has one or more")
        self._microns = _microns(axes, [*levels[:1], scales], self._axes)

    def _axis(self, axes: Sequence[Any], number: int, where: str) -> str:
        return self._need(self._need(axes, number, dict, where), "name", str, f"{where}[{number}].")

    def _need(self, holder: Any, key: str | int, kind: type[Kind], where: str = "") -> Kind:
        """A value of the metadata, of the type it must have."""
        place = f"{where}[{key}]" if isinstance(key, int) else f"{where}{key}"
        try:
            value = holder[key]
        except (KeyError, IndexError):
            raise DataError(f"{self._name}: its metadata has no {place}; needed is {_WORDS[kind]}") from None
        if not isinstance(value, kind):
            raise DataError(f"{self._name}: {place} in its metadata is {value!r:.60}; needed is {_WORDS[kind]}")
        return value

    def _array(self, group: Any, name: str) -> Any:
        import zarr

        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name.strip("./"):
            raise DataError(f"{self._name}: the level {name!r} in its metadata does not lie inside of it")
        try:
            array = group[name]
        except Exception as error:
            raise DataError(f"{self._name}: its level {name!r} cannot be opened: {_said(error)}") from error
        if not isinstance(array, zarr.Array):
            raise DataError(f"{self._name}: its level {name!r} is a group, not an array")
        return array

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

    def _layout(self) -> FileLayout:
        first, known = self._arrays[0], self._axes in ("yx", "cyx", "zyx", "czyx", "tcyx", "tyx", "tczyx", "tzyx")
        sizes = dict(zip(self._axes, first.shape, strict=False))
        if not known or sizes.get("t", 1) != 1 or len(self._axes) != first.ndim:
            raise DataError(
                f"{self._name} has shape {first.shape} and axes {self._axes!r}; an image ends in y, x or z, y, x"
            )
        dims = [i for i, axis in enumerate(self._axes) if axis in "zyx"]
        levels = []
        for number, array in enumerate(self._arrays):
            same = array.ndim == first.ndim and array.dtype == first.dtype
            if not same or ("c" in sizes and array.shape[self._axes.index("c")] != sizes["c"]):
                what = f"{array.shape} of {array.dtype}, level 0 has {first.shape} of {first.dtype}"
                raise DataError(f"{self._name}: level {number} has shape {what}; they must fit together")
            if min(array.shape) < 1 or min(array.chunks) < 1:
                raise DataError(f"{self._name}: level {number} has shape {array.shape} in chunks of {array.chunks}")
            chunk = math.prod(array.chunks) * array.dtype.itemsize
            limits.check_piece(self._name, f"a chunk of {' x '.join(map(str, array.chunks))}", chunk)
            size = tuple(array.shape[i] for i in dims)
            tile = [array.chunks[i] for i in dims]
            tile = [side * max(1, _SMALLEST // side) if len(dims) == 2 else side for side in tile]
            levels.append(PyramidLevel(size, tuple(tile), first.shape[-2] / array.shape[-2]))
        dtype = np.dtype(first.dtype).newbyteorder("=")
        return FileLayout(tuple(levels), sizes.get("c", 1), dtype, self._microns, "zarr")


def _microns(axes: Sequence[Any], holders: Sequence[Any], names: str) -> float | None:
    """Microns per pixel in x, where the scale and its unit are given; what cannot be understood is not given."""
    if "x" not in names:
        return None
    place = names.index("x")
    factor = _MICRONS.get(str(axes[place].get("unit")))
    steps = [holder.get("coordinateTransformations") for holder in holders]
    for step in itertools.chain.from_iterable(s for s in steps if isinstance(s, list)):
        scale = step.get("scale") if isinstance(step, dict) and step.get("type") == "scale" else None
        if factor and isinstance(scale, list) and len(scale) == len(names) and isinstance(scale[place], (int, float)):
            microns = float(scale[place]) * factor
            return microns if 0 < microns < math.inf else None
    return None


def _members(group: Any) -> str:
    try:
        return ", ".join(sorted(map(str, group))[:5]) or "it has none"
    except Exception:
        return "they cannot be listed"


def _said(error: Exception) -> str:
    """The first line of an error."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
