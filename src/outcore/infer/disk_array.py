"""An array in a ``.npy`` file, read and written piece by piece, without mapping it into memory.

A map of a slide is larger than memory and is filled over hours. Writing to a file that is mapped into memory is writing
to memory: when the disk is full the system has nobody to tell, and ends the process with SIGBUS. On a file system
in memory even reading a hole can do that. Here every row of a piece is written by a call that can fail (`os.pwrite`),
so that a full disk is an error like any other, and what was written before stays. Zeros that are written over zeros
are left out: they stay holes in the file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DiskArray"]

Pixels = np.ndarray[Any, Any]


class DiskArray:
    """Numbers in a file, in C order; `array[region]` reads, `array[region] = numbers` writes.

    A region is made of numbers and slices without steps, the last dimensions left out meaning all of them.

    >>> import tempfile
    >>> made = DiskArray.create(Path(tempfile.mkdtemp()) / "a.npy", (4, 6), np.dtype(np.uint8))
    >>> made[1:3, 2:4] = np.full((2, 2), 7, np.uint8)
    >>> made[2].tolist()
    [0, 0, 7, 7, 0, 0]
    """

    def __init__(self, path: Path, shape: Sequence[int], dtype: np.dtype[Any], offset: int) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self._offset, self._file = offset, os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._file)

    @classmethod
    def create(cls, path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> DiskArray:
        """A new file of zeros, all of it a hole."""
        described = np.lib.format.dtype_to_descr(dtype)
        with path.open("wb") as file:
            header = {"descr": described, "fortran_order": False, "shape": tuple(map(int, shape))}
            np.lib.format.write_array_header_1_0(file, header)
            offset = file.tell()
            file.truncate(offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return cls(path, shape, dtype, offset)

    @classmethod
    def open(cls, path: Path) -> DiskArray:
        """A file that is there."""
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
        if fortran:
            raise ValueError(f"{path} is stored column by column")
        return cls(path, shape, dtype, offset)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def plane(self) -> DiskArray:
        """An array of one plane as that plane, in the same file."""
        return DiskArray(self.path, self.shape[1:], self.dtype, self._offset)

    def __getitem__(self, place: Any) -> Pixels:
        bounds, kept = self._bounds(place)
        found = np.empty([high - low for low, high in bounds], self.dtype)
        rows = found.reshape(-1, found.shape[-1]) if found.size else found[:0]
        for row, (at, length) in zip(rows, self._rows(bounds), strict=False):
            row[:] = np.frombuffer(os.pread(self._file, length, at), self.dtype)
        return found.reshape([n for n, keep in zip(found.shape, kept, strict=True) if keep])

    def __setitem__(self, place: Any, numbers: Pixels) -> None:
        bounds, _ = self._bounds(place)
        sizes = [high - low for low, high in bounds]
        numbers = np.ascontiguousarray(numbers, self.dtype).reshape(sizes)
        if not numbers.size or not (numbers.any() or self[place].any()):
            return
        for row, (at, _) in zip(numbers.reshape(-1, sizes[-1]), self._rows(bounds), strict=True):
            left = memoryview(row.tobytes())
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        os.fsync(self._file)

    def _bounds(self, place: Any) -> tuple[list[tuple[int, int]], list[bool]]:
        """Begin and end in every dimension, and whether the dimension stays."""
        given = place if isinstance(place, tuple) else (place,)
        given = (*given, *(slice(None) for _ in self.shape[len(given) :]))
        bounds, kept = [], []
        for one, size in zip(given, self.shape, strict=True):
            kept.append(isinstance(one, slice))
            low, high, step = one.indices(size) if isinstance(one, slice) else (int(one), int(one) + 1, 1)
            if step != 1 or not 0 <= low < size + kept[-1]:
                raise IndexError(f"{place} of an array of {self.shape}")
            bounds.append((low, max(low, high)))
        return bounds, kept

    def _rows(self, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Where each row of a region begins in the file, and its bytes."""
        low, high = bounds[-1]
        outer = self.shape[:-1]
        strides = [int(np.prod(self.shape[n + 1 :], dtype=np.int64)) for n in range(len(outer))]
        for index in np.ndindex(*(end - begin for begin, end in bounds[:-1])):
            row = sum((i + b[0]) * s for i, b, s in zip(index, bounds, strides, strict=False))
            yield self._offset + (row + low) * self.dtype.itemsize, (high - low) * self.dtype.itemsize
