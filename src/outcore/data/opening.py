"""Which reader opens what: `open_slide`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from outcore.data.array_reader import ArrayReader, load_array, load_image
from outcore.data.reader import Reader
from outcore.data.slide import OnDamage, Slide
from outcore.errors import DataError, MissingPackageError

_TIFF = (".tif", ".tiff", ".btf", ".tf8", ".svs")
_SCANNERS = (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".dcm", ".czi")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
SLIDE_ENDINGS = frozenset((*_TIFF, *_SCANNERS, *_IMAGES, ".npy", ".zarr"))
"""The endings of readable files and folders."""


def open_slide(source: str | Path | np.ndarray[Any, Any] | Tensor, *, on_damage: OnDamage = "raise") -> Slide:
    """A slide or volume, opened lazily.

    >>> open_slide(np.zeros((3, 64, 96), np.uint8)).region((60, 0), (8, 4)).shape
    torch.Size([3, 8, 4])

    Args:
        source: a scanner's file (OpenSlide), a TIFF or OME-TIFF, a Zarr array or OME-NGFF image, a ``.npy`` file, an
            ordinary image, or an array with channels first.
        on_damage: what to do with a tile that cannot be decoded: ``"raise"``, or read it as ``"white"`` and count it.

    Raises:
        DataError: there is no such file, or it is not readable, or what it needs is not installed.
    """
    if isinstance(source, (np.ndarray, Tensor)):
        array = source.numpy() if isinstance(source, Tensor) else source
        return Slide("array", partial(ArrayReader, array), on_damage=on_damage)
    path = Path(source)
    _check_file(path)
    slide = Slide(str(path), _reader(path), on_damage=on_damage)
    slide.layout  # noqa: B018  a file that cannot be read is named now, not in the middle of an epoch
    return slide


def _check_file(path: Path) -> None:
    """Refuse what is not there, and what would block or never end when it is read."""
    try:
        there, plain = path.exists(), path.is_file() or path.is_dir()
    except (OSError, ValueError) as error:  # names that are too long, or hold a zero byte
        raise DataError(f"no file {str(path)[:200]!r}: {error}") from None
    if not there:
        raise DataError(f"no file {path}; give the path of a slide, an image or an array")
    if not plain:
        raise DataError(f"{path} is a pipe, a socket or a device, not a file; write it to a file first")


def is_zarr(path: Path) -> bool:
    """Whether a path is a folder that holds a Zarr array or group."""
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup", ".zarray"))


def _reader(path: Path) -> Callable[[], Reader]:
    suffix = path.suffix.lower()
    if path.is_dir() and (suffix == ".zarr" or is_zarr(path)):
        return partial(_zarr, path)
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a slide; name a file in it")
    if suffix == ".npy":
        return partial(_array, path)
    if suffix in _IMAGES:
        return partial(_image, path)
    if suffix in _SCANNERS and suffix not in _TIFF:
        return partial(_openslide, path)
    if suffix in _TIFF:
        return partial(_openslide, path) if _vendor(path) not in (None, "generic-tiff") else partial(_tiff, path)
    raise DataError(f"{path} has a format that is not known; known are {', '.join(sorted(SLIDE_ENDINGS))}")


def _vendor(path: Path) -> str | None:
    """Which scanner wrote a TIFF, where OpenSlide is installed and knows."""
    if find_spec("openslide") is None:
        return None
    import openslide

    try:
        vendor: str | None = openslide.OpenSlide.detect_format(str(path))
    except openslide.OpenSlideError:
        return None
    return vendor


def _need(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise MissingPackageError(f"reading {path} needs {package}; install it with: pip install 'outcore[slides]'")


def _zarr(path: Path) -> Reader:
    _need("zarr", path)
    from outcore.data.zarr_reader import ZarrReader

    return ZarrReader(path)


def _tiff(path: Path) -> Reader:
    _need("tifffile", path)
    from outcore.data.tiff_reader import TiffReader

    return TiffReader(path)


def _openslide(path: Path) -> Reader:
    _need("openslide", path)
    from outcore.data.openslide_reader import OpenSlideReader

    return OpenSlideReader(path)


def _array(path: Path) -> Reader:
    return ArrayReader(load_array(path), str(path))


def _image(path: Path) -> Reader:
    return ArrayReader(load_image(path), str(path), "image")
