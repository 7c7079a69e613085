"""A map that is too large to hold, filled tile by tile, in any order, over any number of runs.

Tiles of a network come in its own grid, tiles of an image file must be written in the file's order, and a run may end
at any moment. So the numbers first go into a file (`outcore.infer.disk_array`), and a list says which regions of it are
filled. A region is listed only after its numbers have reached the disk, so what is listed is there, also after the
power went. When all regions are filled the file is turned into what was asked for: ``.tif`` (a pyramid), ``.zarr`` or
``.npy``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outcore.errors import DataError, MissingPackageError
from outcore.infer.disk_array import DiskArray
from outcore.infer.pyramid import write_pyramid
from outcore.machine.units import format_bytes
from outcore.ops.region import Region

__all__ = ["MapFile", "Progress", "check_kind", "write_map"]

_CHUNK = 512
_SYNC_S = 5.0
"""Seconds between two writes to the disk."""


def check_kind(path: Path, shape: tuple[int, ...]) -> None:
    """Raise for a file name that no map of this shape can be written under, before anything is computed."""
    suffix = path.suffix.lower()
    if suffix not in (".tif", ".tiff", ".zarr", ".npy"):
        raise DataError(f"a map is written as .tif, .zarr or .npy, not {path.name}")
    if suffix in (".tif", ".tiff") and len(shape) != 2 and not (len(shape) == 3 and shape[0] <= 4):
        raise DataError(f"{path} would hold a map of shape {shape}; write it as .npy or .zarr")


@dataclass
class MapFile:
    """One map in the making: ``map.npy`` of a folder."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def open(self, *, again: bool) -> DiskArray:
        """The file as it was left, or empty."""
        if again and self.path.is_file():
            with contextlib.suppress(ValueError):  # cut off in its first bytes
                made = DiskArray.open(self.path)
                if made.shape == self.shape and made.dtype == self.dtype:
                    return made
        nbytes, free = int(np.prod(self.shape)) * self.dtype.itemsize, shutil.disk_usage(self.path.parent).free
        if nbytes > free:
            need = f"a map of {format_bytes(nbytes)} is put together there and {format_bytes(free)} are free"
            raise DataError(f"{self.path.parent.parent} is too full: {need}; make room, or say another -o or --level")
        return DiskArray.create(self.path, self.shape, self.dtype)


@dataclass
class Progress:
    """Which regions are filled, and how many pixels of each class they hold."""

    path: Path
    maps: Sequence[DiskArray]
    filled: set[Region] = field(default_factory=set)
    counts: list[int] = field(default_factory=list)
    _waiting: list[str] = field(default_factory=list)
    _synced: float = field(default_factory=time.monotonic)

    def read(self) -> None:
        """Read what an earlier run has listed; a line that was cut off does not count."""
        if not self.path.is_file():
            return
        for line in self.path.read_text(errors="replace", encoding="utf-8").splitlines():
            try:
                said = json.loads(line)
                region = tuple((int(a), int(b)) for a, b in said["region"])
                counts = [int(n) for n in said["counts"]]
            except (ValueError, KeyError, TypeError):
                continue
            self._add(region, counts)

    def note(self, region: Region, counts: Sequence[int] = ()) -> None:
        """List a region whose numbers were written."""
        self._add(region, counts)
        self._waiting.append(json.dumps({"region": region, "counts": list(counts)}))
        if time.monotonic() - self._synced > _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Write the values to the disk, then the list."""
        for pixels in self.maps:
            pixels.flush()
        if self._waiting:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
        self._waiting.clear()
        self._synced = time.monotonic()

    def _add(self, region: Region, counts: Sequence[int]) -> None:
        if region in self.filled:
            return
        self.filled.add(region)
        self.counts += [0] * (len(counts) - len(self.counts))
        for number, count in enumerate(counts):
            self.counts[number] += count


def write_region(pixels: DiskArray, region: Region, part: torch.Tensor) -> None:
    """Put numbers into a map."""
    pixels[tuple(slice(lo, hi) for lo, hi in region)] = part.cpu().numpy()


def write_map(pixels: DiskArray, made: Path, *, scratch: Path, **shown: Any) -> None:
    """Turn a filled map into the file that was asked for; `shown` as `write_pyramid` takes it."""
    suffix = made.suffix.lower()
    if suffix == ".npy":
        pixels.flush()
        pixels.path.replace(made)
    elif suffix == ".zarr":
        _write_zarr(pixels, made)
    else:
        write_pyramid(made, pixels, scratch=scratch, **shown)


def _write_zarr(pixels: DiskArray, made: Path) -> None:
    try:
        import zarr
    except ImportError:
        raise MissingPackageError(
            f"writing {made} needs zarr; install it with: pip install 'outcore[slides]'"
        ) from None
    if made.exists():
        shutil.rmtree(made)  # half of one, from a run before
    chunks = (*(1 for _ in pixels.shape[:-2]), *(min(_CHUNK, n) for n in pixels.shape[-2:]))
    array = zarr.create_array(str(made), shape=pixels.shape, chunks=chunks, dtype=pixels.dtype)
    rows = pixels.shape[-2]
    for lead in np.ndindex(pixels.shape[:-2]):
        for top in range(0, rows, _CHUNK):
            box = (*lead, slice(top, min(top + _CHUNK, rows)))
            array[box] = pixels[box]
