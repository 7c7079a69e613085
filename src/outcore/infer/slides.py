"""Which slides to run a network on: one file, the rows of a table, or everything in a folder.

Every slide gets a name that is its own, under which its outputs are written: the name of its file, and where two files
have the same one, a few letters of a hash of the path as well. So a name does not depend on the other slides' order.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outcore.data.opening import SLIDE_ENDINGS, is_zarr
from outcore.data.table_file import listed, read_rows
from outcore.errors import DataError
from outcore.infer.pyramid import SOFTWARE

__all__ = ["SlideInput", "find_slides", "holds_several"]

_OUTPUTS = (".mask.tif", ".heat.tif", ".overlay.png")
"""What infer writes beside a slide, which is no slide."""
_BEGINNING = 2**13
"""Bytes of a TIFF in which infer's own mark stands."""


@dataclass(frozen=True)
class SlideInput:
    """One slide to run a network on."""

    path: Path
    given: str
    """The path as the table or folder says it."""
    name: str
    """Of its outputs."""
    label: str = ""
    """What the table says about it; only passed on."""


def holds_several(data: Path) -> bool:
    """Whether a path names several slides: a table, or a folder that is not itself a slide."""
    return data.suffix.lower() == ".csv" or (data.is_dir() and data.suffix.lower() != ".zarr" and not is_zarr(data))


def find_slides(data: Path) -> list[SlideInput]:
    """The slides of a table in its order, or of a folder and the folders in it by name.

    Raises:
        DataError: there is none.
    """
    if data.is_dir():
        found = [(path, str(path.relative_to(data)), "") for path in _walk(data)]
        if not found:
            endings = ", ".join(sorted(SLIDE_ENDINGS))
            raise DataError(f"{data} holds no slides; names of slides end in {endings}")
    else:
        columns, rows = read_rows(data)
        if "path" not in columns:
            raise DataError(f"{data} has columns {listed(columns)}; needed is path")
        found = [(data.parent / row["path"].strip(), row["path"].strip(), row.get("label", "")) for _, row in rows]
        if not found:
            raise DataError(f"{data} names no slide; below its columns write a line for each, like slides/001.tif")
    if twice := [given for given, count in Counter(given for _, given, _ in found).items() if count > 1]:
        raise DataError(f"{data} names {twice[0]} more than once; once is enough")
    stems = [path.stem for path, _, _ in found]
    often = Counter(stems)
    return [
        SlideInput(path, given, stem if often[stem] == 1 else f"{stem}-{_letters(given)}", label)
        for (path, given, label), stem in zip(found, stems, strict=True)
    ]


def _walk(folder: Path) -> Iterator[Path]:
    """Files and Zarr folders that end as slides do, without hidden ones."""
    for where, folders, files in os.walk(folder):
        here = Path(where)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        arrays = [name for name in folders if name.lower().endswith(".zarr") or is_zarr(here / name)]
        folders[:] = [name for name in folders if name not in arrays]
        slides = (name for name in files if _ending(name) in SLIDE_ENDINGS and not name.startswith("."))
        slides = (name for name in slides if not name.endswith(_OUTPUTS))
        found = sorted([*(name for name in slides if not _is_map(here / name)), *arrays])
        stems = {name.rpartition(".")[0] for name in found}
        yield from (here / name for name in found if not _is_mask(name, stems))


def _is_map(path: Path) -> bool:
    """Whether a TIFF of any name was written by infer, which says so at its beginning."""
    if path.suffix.lower() not in (".tif", ".tiff"):
        return False
    try:
        with path.open("rb") as file:
            return SOFTWARE.encode() in file.read(_BEGINNING)
    except OSError:  # what cannot be read is said of the slide
        return False


def _is_mask(name: str, stems: set[str]) -> bool:
    """Whether a file is the mask of a slide beside it: ``a-mask.tif`` or ``a_mask.png`` where there is an ``a``."""
    stem = name.rpartition(".")[0]
    return stem.lower().endswith(("-mask", "_mask")) and stem[:-5] in stems


def _ending(name: str) -> str:
    return f".{name.rpartition('.')[2].lower()}"  # a hundred thousand paths take their time


def _letters(given: str) -> str:
    return hashlib.blake2b(given.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
