"""Synthetic slides and volumes as real files: pyramidal tiled TIFF, NumPy and Zarr.

A slide of 100,000 x 100,000 pixels has 38,000 tiles of 512 pixels, and almost all of them are glass or one of a few
patterns. Those are compressed once and written as often as they occur; only the tiles on the edge of a piece, and those
of the coarser levels, are computed. Memory holds a few tiles at a time.
"""

from __future__ import annotations

import csv
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outcore.data.patterns import KINDS, VARIANTS, patterns
from outcore.data.scene import GLASS, Scene
from outcore.errors import DataError
from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads

Compression = Literal["deflate", "jpeg"]
Pixels = np.ndarray[Any, Any]
Encoder = Callable[[Pixels], bytes]

_AHEAD = 16
"""Tiles that are computed while one is written."""


def write_slide(
    path: str | Path, scene: Scene, *, compression: Compression = "deflate", mask: bool = False, sparse: bool = False
) -> Path:
    """Write a scene as a pyramidal TIFF.

    Args:
        path: the file; replaced if it is there.
        scene: what it shows.
        compression: ``"deflate"`` keeps every pixel; ``"jpeg"`` is what scanners write.
        mask: write the right answer for segmentation instead of the image.
        sparse: leave out the tiles of glass; readers must take them for white.
    """
    try:
        import tifffile
    except ImportError:
        raise DataError(f"writing {path} needs tifffile; install it with: pip install 'outcore[slides]'") from None
    if len(scene.size) != 2:
        raise DataError(f"{path} would be a volume of size {scene.size}; write it with write_volume")
    if compression == "jpeg" and mask:
        raise DataError(f"{path} is a mask, and JPEG would change its numbers; write it with compression='deflate'")
    encode = _encoder(compression, 1 if mask else 3)
    per_centimetre = 10000 / scene.microns_per_pixel
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level, size in enumerate(scene.levels):
            file.write(
                _tiles(scene, level, encode, mask=mask, sparse=sparse),
                shape=size if mask else (*size, 3),
                dtype=np.uint8,
                tile=(scene.tile, scene.tile),
                photometric="minisblack" if mask else "ycbcr" if compression == "jpeg" else "rgb",
                compression="jpeg" if compression == "jpeg" else "adobe_deflate",
                subsampling=(2, 2) if compression == "jpeg" else None,
                resolution=(per_centimetre / 4**level,) * 2,
                resolutionunit="CENTIMETER",
                subfiletype=1 if level else 0,
                metadata=None,
            )
    return Path(path)


def write_volume(path: str | Path, scene: Scene) -> Path:
    """Write a scene as an array, channels first: ``.npy``, or ``.zarr`` in chunks of the scene's tiles."""
    path = Path(path)
    shape = (scene.channels, *scene.size)
    if path.suffix == ".npy":
        file: Any = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        with path.open("r+b") as room:  # a full disk is an error now, and no SIGBUS later
            os.posix_fallocate(room.fileno(), 0, path.stat().st_size)
    elif path.suffix == ".zarr":
        try:
            import zarr
        except ImportError:
            raise DataError(f"writing {path} needs zarr; install it with: pip install 'outcore[slides]'") from None
        chunks = (scene.channels, *(min(scene.tile, n) for n in scene.size))
        file = zarr.create_array(str(path), shape=shape, chunks=chunks, dtype="uint8", overwrite=True)
    else:
        raise DataError(f"{path} must end in .npy or .zarr")
    for box in product(*(_cuts(n, scene.tile) for n in scene.size)):
        file[(slice(None), *(slice(*span) for span in box))] = np.moveaxis(scene.region(box), -1, 0)
    return path


def write_slides(
    folder: str | Path,
    count: int,
    *,
    size: Sequence[int],
    share: float = 0.3,
    seed: int = 0,
    masks: bool = False,
    tile: int = 512,
    compression: Compression = "deflate",
    form: Literal["tif", "npy", "zarr"] | None = None,
    name: str = "slides.csv",
) -> Path:
    """Write a data set: files, and the table that names them with their labels.

    Files are TIFF for slides and NumPy arrays for volumes, unless another form is asked for.

    The four combinations of kinds occur equally often, so half of every multiple of four has each label, and so has
    every kind at every place.

    Returns:
        the table, with columns ``path``, ``label`` and, if asked for, ``mask``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng([seed, 3]).permutation(count)
    rows = []
    for number in range(count):
        combination = int(order[number]) % 4
        kinds = (combination // 2, combination % 2)
        scene = Scene(tuple(size), kinds, share, seed * 100_003 + number, tile)
        file = folder / f"{Path(name).stem}-{number:03}.{form or ('tif' if len(size) == 2 else 'npy')}"
        if file.suffix == ".tif":
            write_slide(file, scene, compression=compression)
        else:
            write_volume(file, scene)
        rows.append({"path": file.name, "label": str(scene.label)})
        if masks:
            rows[-1]["mask"] = write_slide(file.with_name(f"{file.stem}-mask.tif"), scene, mask=True).name
    with (folder / name).open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, list(rows[0]) if rows else ["path", "label"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def _tiles(scene: Scene, level: int, encode: Encoder, *, mask: bool, sparse: bool) -> Iterator[bytes]:
    """The compressed tiles of a level, row by row; tiles in the making are computed by threads."""
    known = _known(scene, level, encode, mask=mask)
    boxes = product(*(_cuts(n, scene.tile) for n in scene.levels[level]))
    waiting: deque[bytes | WorkerTask[bytes]] = deque()
    threads = WorkerThreads(min(_AHEAD, os.cpu_count() or 1), "outcore-tiles")
    try:
        for number, box in enumerate(boxes):
            kind = scene.uniform(box, level)
            if kind == GLASS and sparse and number:
                waiting.append(b"")
            elif kind is not None and (made := known(kind, box)) is not None:
                waiting.append(made)
            else:
                waiting.append(threads.submit(_compute, scene, level, box, encode, mask))
            if len(waiting) > _AHEAD:
                yield _finished(waiting.popleft())
        yield from map(_finished, waiting)
    finally:
        threads.cancel()


def _finished(tile: bytes | WorkerTask[bytes]) -> bytes:
    return tile if isinstance(tile, bytes) else tile.result()


def _known(scene: Scene, level: int, encode: Encoder, *, mask: bool) -> Callable[[int, Any], bytes | None]:
    """Tiles that are all glass or one pattern, compressed once."""
    size = (scene.tile, scene.tile)
    if mask:
        flat = [encode(np.full((*size, 1), value, np.uint8)) for value in (1, 2, 3, 0)]
        return lambda kind, box: flat[kind]
    glass = encode(np.full((*size, 3), scene.blank, np.uint8))
    drawn = [encode(tile) for tile in patterns(2, scene.tile)] if level == 0 else []

    def find(kind: int, box: Any) -> bytes | None:
        if kind == GLASS:
            return glass
        if not drawn:
            return None
        place = [np.array([start // scene.tile]) for start, _ in box]
        return drawn[min(kind, len(KINDS) - 1) * VARIANTS + int(scene.variant(place)[0])]

    return find


def _compute(scene: Scene, level: int, box: Sequence[tuple[int, int]], encode: Encoder, mask: bool) -> bytes:
    pixels = scene.mask(box, level)[..., None] if mask else scene.region(box, level)
    full = np.full((scene.tile, scene.tile, pixels.shape[-1]), 0 if mask else scene.blank, np.uint8)
    full[: pixels.shape[0], : pixels.shape[1]] = pixels
    return encode(full)


def _encoder(compression: str, channels: int) -> Encoder:
    if compression == "deflate":
        return lambda pixels: zlib.compress(np.ascontiguousarray(pixels).data, 1)
    if compression != "jpeg":
        raise DataError(f"compression={compression!r} is not known; say 'deflate' or 'jpeg'")
    import io

    from PIL import Image

    def jpeg(pixels: Pixels) -> bytes:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=85, subsampling="4:2:0")
        return out.getvalue()

    return jpeg


def _cuts(size: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, size)) for start in range(0, size, step)]
