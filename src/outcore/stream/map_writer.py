"""A map that is too large to hold, written tile by tile: ``.tif`` (pyramidal), ``.zarr`` or ``.npy``.

Tiles of a network come in its own grid; tiles of a TIFF must be written in the file's order. So a TIFF is first put
together in a file beside it, mapped into memory, and then written level by level; each level halves the one before by
taking every second pixel, which keeps classes classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from outcore.errors import StreamError
from outcore.ops.region import Region

__all__ = ["MapWriter"]

_TILE = 512
Pixels = np.ndarray[Any, Any]


class MapWriter:
    """Writes regions of one map of (channels, pixels...) or (pixels...); use it in a ``with`` statement."""

    def __init__(self, path: str | Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.path, self.shape = Path(path), shape
        suffix = self.path.suffix.lower()
        self._mapped: Path | None = None
        if suffix == ".zarr":
            self.file: Any = _zarr(self.path, shape, dtype)
        elif suffix == ".npy":
            self.file = np.lib.format.open_memmap(self.path, mode="w+", dtype=dtype, shape=shape)
        elif suffix in (".tif", ".tiff"):
            if len(shape) != 2 and not (len(shape) == 3 and shape[0] <= 4):
                raise StreamError(f"{self.path} would hold a map of shape {shape}; write it as .npy or .zarr")
            self._mapped = self.path.with_name(self.path.name + ".part.npy")
            self.file = np.lib.format.open_memmap(self._mapped, mode="w+", dtype=dtype, shape=shape)
        else:
            raise StreamError(f"a map is written as .tif, .zarr or .npy, not {self.path.name}")

    def write(self, region: Region, part: torch.Tensor) -> None:
        """Put one region into the map."""
        self.file[tuple(slice(lo, hi) for lo, hi in region)] = part.cpu().numpy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self.file, np.memmap):
            self.file.flush()
        if self._mapped is not None:
            try:
                if kind is None:
                    _write_tiff(self.path, self.file)
            finally:
                del self.file
                self._mapped.unlink()


def _zarr(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    try:
        import zarr
    except ImportError:
        raise StreamError(f"writing {path} needs zarr; install it with: pip install 'outcore[slides]'") from None
    chunks = (*(1 for _ in shape[:-2]), *(min(_TILE, n) for n in shape[-2:]))
    return zarr.create_array(str(path), shape=shape, chunks=chunks, dtype=dtype, overwrite=True)


def _write_tiff(path: Path, pixels: Pixels) -> None:
    try:
        import tifffile
    except ImportError:
        raise StreamError(f"writing {path} needs tifffile; install it with: pip install 'outcore[slides]'") from None
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        step = 1
        while True:
            level = pixels[..., ::step, ::step]
            last = max(level.shape[-2:]) <= 2 * _TILE
            file.write(
                _tiles(level),
                shape=level.shape,
                dtype=level.dtype,
                tile=(_TILE, _TILE),
                photometric="minisblack",
                planarconfig="separate" if level.ndim == 3 else None,
                compression="adobe_deflate",
                subfiletype=1 if step > 1 else 0,
                metadata=None,
            )
            if last:
                return
            step *= 2


def _tiles(level: Pixels) -> Iterator[Pixels]:
    """The tiles of a level in the order of the file, the last ones filled up with zeros."""
    planes = level[None] if level.ndim == 2 else level
    for plane in planes:
        for y, x in itertools.product(range(0, plane.shape[0], _TILE), range(0, plane.shape[1], _TILE)):
            part = np.ascontiguousarray(plane[y : y + _TILE, x : x + _TILE])
            yield np.pad(part, [(0, _TILE - n) for n in part.shape])
