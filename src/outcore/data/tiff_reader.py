"""Tiled TIFF, OME-TIFF and pyramids of them, through tifffile.

tifffile reads the directories; the tiles are fetched with ``pread`` and decoded here one at a time, because that needs
no lock: many threads can read one file at once, and the codecs let go of the interpreter. Without the package
imagecodecs, tifffile decodes uncompressed and deflate tiles; JPEG, LZW and JPEG 2000 need it. Plain deflate is then
inflated here, into a buffer of the right size from the start: growing one takes longer than the rest.

Most tiles of a slide are glass, and encoders give equal bytes for equal pixels: a tile whose few bytes were met before
is not decoded again.

A pyramid is either in the sub-directories of its first image (OME-TIFF, SVS by tifffile) or in the images that follow
it (generic pyramids): smaller ones of the same kind, all sides reduced by the same factor.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from outcore.data.cache import TileCache
from outcore.data.reader import FileLayout, Pixels, PyramidLevel
from outcore.errors import DataError

_Stored = tuple[bytes, ...] | None

_FEW_BYTES = 4096
"""Tiles of no more compressed bytes are remembered by their bytes,"""
_MET_BYTES = 16 << 20
"""up to so many bytes of pixels."""
_LARGEST_STRIP = 4096
_MICRONS = {2: 25400.0, 3: 10000.0}
"""Microns in the unit of a resolution tag: inch, centimetre."""
_DEFLATE = (8, 32946)
"""Numbers of the compression: Adobe's, and the older one."""


class TiffReader:
    """A TIFF file: two or three dimensions, any number of channels."""

    decoded = True

    def __init__(self, path: Path) -> None:
        import tifffile

        # What is odd about a file is in our own error; a program that wants tifffile's log has its own handler.
        logging.getLogger("tifffile").addHandler(logging.NullHandler())
        opened: Any = None
        try:
            self._file = opened = tifffile.TiffFile(path)
            series = self._file.series[0]
            self._levels = _pyramid(self._file)
            self._axes = _axes(path, series)
            self.layout = self._layout(series.keyframe)
        except BaseException as error:
            if opened is not None:
                opened.close()
            if isinstance(error, DataError) or not isinstance(error, Exception):
                raise
            raise DataError(f"{path} is not a readable TIFF: {error}; is it complete?") from error
        self._descriptor = os.open(path, os.O_RDONLY)
        self._bytes = os.fstat(self._descriptor).st_size
        self._inflates = importlib.util.find_spec("imagecodecs") is None
        self._met = TileCache(_MET_BYTES)
        weakref.finalize(self, _close, self._file, self._descriptor)

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """The pixels of a tile, channels first; None for one that was never written."""
        pages = self._pages(level, index[0] if self._volume else 0)
        stored = [self._stored(page, index[-2:]) for page in pages]
        if all(data is None for data in stored):
            return None
        if sum(len(plane) for data in stored for plane in data or ()) > _FEW_BYTES:
            return self._decoded(pages, stored, index)
        down, across = self._grid(pages[0].keyframe)
        met = (level, index[-2] == down - 1, index[-1] == across - 1, *stored)  # tiles at the end are cut
        if (pixels := self._met.get(met)) is None and (pixels := self._decoded(pages, stored, index)) is not None:
            self._met.put(met, pixels)
        return pixels

    def _decoded(self, pages: list[Any], stored: list[_Stored], index: tuple[int, ...]) -> Pixels | None:
        parts = [self._decode(page, data, index[-2:]) for page, data in zip(pages, stored, strict=True)]
        if all(part is None for part in parts):
            return None
        shape = next(part.shape for part in parts if part is not None)
        full = [np.zeros(shape, self.layout.dtype) if part is None else part for part in parts]
        pixels = full[0] if len(full) == 1 else np.concatenate(full, axis=2)
        pixels = np.ascontiguousarray(pixels[..., : self.layout.channels].transpose(2, 0, 1))
        return pixels[:, None] if self._volume else pixels

    @property
    def _volume(self) -> bool:
        return "Z" in self._axes

    def _layout(self, first: Any) -> FileLayout:
        sizes = dict(zip(self._axes, self._levels[0].shape, strict=True))
        samples, planes = sizes.get("S", 1), sizes.get("C", 1)
        levels = []
        for series in self._levels:
            here = dict(zip(self._axes, series.shape, strict=True))
            page = series.keyframe
            tile = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
            depth, deep = ((here["Z"],), (1,)) if self._volume else ((), ())
            size = (*depth, here["Y"], here["X"])
            tile = (min(tile[0], here["Y"]), min(tile[1], here["X"])) if not page.is_tiled else tile
            levels.append(PyramidLevel(size, (*deep, *tile), sizes["Y"] / here["Y"]))
        # A fourth sample of a colour image is its opacity.
        channels = 3 if samples == 4 and planes == 1 else samples * planes
        return FileLayout(tuple(levels), channels, first.dtype, _microns(self._file, first), "tiff")

    def _pages(self, level: int, depth: int) -> list[Any]:
        """The pages that hold the channels of one plane."""
        series = self._levels[level]
        sizes = dict(zip(self._axes, series.shape, strict=True))
        leading = [axis for axis in self._axes if axis not in "YXS"]
        numbers = []
        for channel in range(sizes.get("C", 1)):
            number = 0
            for axis in leading:
                number = number * sizes[axis] + {"C": channel, "Z": depth}.get(axis, 0)
            numbers.append(number)
        return [series.pages[number] for number in numbers]

    def _stored(self, page: Any, index: tuple[int, ...]) -> _Stored:
        """The bytes of each plane of a tile; None if one was never written."""
        planes = []
        for number in self._segments(page.keyframe, index):
            count = page.databytecounts[number]
            if not count:
                return None
            offset = page.dataoffsets[number]
            if count > self._bytes - offset:
                there = max(0, self._bytes - offset)
                raise DataError(f"{there} of its {count} bytes are there; the file is truncated")
            data = os.pread(self._descriptor, count, offset)
            planes.append(data)
        return tuple(planes)

    def _decode(self, page: Any, stored: _Stored, index: tuple[int, ...]) -> Pixels | None:
        keyframe, parts = page.keyframe, []
        if self._inflates and stored and len(stored) == 1 and (size := _plain_deflate(keyframe)) is not None:
            return inflated(stored[0], size)
        for number, data in zip(self._segments(keyframe, index), stored or (), strict=bool(stored)):
            made, _, shape = keyframe.decode(data, number, jpegtables=keyframe.jpegtables)
            if made is None:
                return None
            parts.append(made.reshape(-1, *made.shape[-3:])[0][: shape[-3], : shape[-2]])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def _segments(self, keyframe: Any, index: tuple[int, ...]) -> list[int]:
        """The numbers under which the planes of a tile are stored."""
        down, across = self._grid(keyframe)
        planes = keyframe.samplesperpixel if keyframe.planarconfig == 2 else 1
        return [(plane * down + index[0]) * across + index[1] for plane in range(planes)]

    @staticmethod
    def _grid(page: Any) -> tuple[int, int]:
        if page.is_tiled:
            return math.ceil(page.imagelength / page.tilelength), math.ceil(page.imagewidth / page.tilewidth)
        return math.ceil(page.imagelength / page.rowsperstrip), 1


def _plain_deflate(page: Any) -> tuple[int, int, int] | None:
    """The size of a page's tiles where they are bytes, compressed by deflate and nothing else; none where not."""
    whole = page.is_tiled and page.dtype == np.uint8 and page.bitspersample == 8 and page.tiledepth == 1
    if not whole or page.compression not in _DEFLATE or page.predictor != 1 or page.fillorder != 1:
        return None
    return page.tilelength, page.tilewidth, page.samplesperpixel


def inflated(data: bytes, size: tuple[int, int, int]) -> Pixels:
    """A tile of bytes from its compressed form."""
    wanted = math.prod(size)
    raw = zlib.decompressobj().decompress(data, wanted)  # and no more, whatever is in it
    if len(raw) < wanted:
        raise DataError(f"it holds {len(raw)} of its {wanted} bytes")
    return np.frombuffer(raw, np.uint8, wanted).reshape(size)


def _pyramid(file: Any) -> list[Any]:
    """The levels of the first image."""
    first = file.series[0]
    if len(first.levels) > 1:
        return list(first.levels)
    levels = [first]
    for series in file.series[1:]:
        if series.axes != first.axes or series.dtype != first.dtype or series.ndim != first.ndim:
            break
        y, x = first.axes.index("Y"), first.axes.index("X")
        ratios = first.shape[y] / series.shape[y], first.shape[x] / series.shape[x]
        smaller = series.shape[y] < levels[-1].shape[y]
        tolerance = 1.5 * max(ratios[0] / series.shape[y], ratios[1] / series.shape[x])
        if not smaller or abs(ratios[0] - ratios[1]) > tolerance:
            break
        levels.append(series)
    return levels


def _axes(path: Path, series: Any) -> str:
    """The axes of an image by letter; every letter that is not known must have size one."""
    known: str = series.axes.replace("I", "Z").replace("Q", "Z")
    for axis, size in zip(known, series.shape, strict=True):
        if axis not in "TZCYXS" or (axis == "T" and size > 1):
            raise DataError(f"{path} has axes {series.axes} of sizes {series.shape}; slides have Z, C, Y, X and S")
    if known.count("Z") > 1:
        raise DataError(f"{path} has axes {series.axes}; which of them is depth cannot be told")
    page = series.keyframe
    if not page.is_tiled and page.rowsperstrip > _LARGEST_STRIP and page.imagelength > _LARGEST_STRIP:
        size = f"{page.imagewidth} x {page.imagelength}"
        raise DataError(f"{path} stores its {size} pixels as one piece; write it again with tiles (tifffile, vips)")
    return known


def _microns(file: Any, page: Any) -> float | None:
    """Microns per pixel, from OME metadata or the resolution tags."""
    if file.is_ome:
        import xml.etree.ElementTree as ElementTree

        for element in ElementTree.fromstring(file.ome_metadata).iter():
            if element.tag.endswith("Pixels") and "PhysicalSizeX" in element.attrib:
                unit = element.attrib.get("PhysicalSizeXUnit", "µm")
                return float(element.attrib["PhysicalSizeX"]) * {"µm": 1.0, "nm": 1e-3, "mm": 1e3}.get(unit, 1.0)
    unit, resolution = page.tags.get("ResolutionUnit"), page.tags.get("XResolution")
    if unit is None or resolution is None or int(unit.value) not in _MICRONS:
        return None
    above, below = resolution.value
    # 72 and 96 dots per inch are what programs write that know nothing.
    if not above or (int(unit.value) == 2 and above / below in (72, 96)):
        return None
    return float(_MICRONS[int(unit.value)] * below / above)


def _close(file: Any, descriptor: int) -> None:
    file.close()
    os.close(descriptor)
