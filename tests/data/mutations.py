"""Broken inputs of every format, made from a seed: bytes turned, cut, moved and doubled, and numbers that lie.

A quarter of the changes is made where formats keep their numbers (the first bytes, the directories, the metadata),
because a byte turned in the middle of compressed pixels finds little.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile

FORMATS = ("tif", "png", "npy", "zarr", "csv")
_NUMBERS = (0, 1, 2, 3, 7, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_VALUES = (None, True, -1, 0, 1, 2**31, 2**62, 1e308, "", "x", "../..", [], {}, [[]], [-1], [0, 0], [2**40, 2**40])


def broken(folder: Path, form: str, seed: int) -> Path:
    """One input, the same for the same seed."""
    draw = random.Random(f"{form} {seed}")
    path = _WRITE[form](folder, draw)
    if form == "zarr":
        _break_zarr(path, draw)
    elif draw.random() < 0.97:  # a few stay as they are
        path.write_bytes(_broken_bytes(path.read_bytes(), draw))
    return path


def _broken_bytes(data: bytes, draw: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        if not made:
            break
        at = draw.randrange(min(len(made), 512) if draw.random() < 0.6 else len(made))
        what = draw.randrange(7)
        if what == 0:
            made[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            made[at] = draw.randrange(256)
        elif what == 2:
            del made[at:]
        elif what == 3:
            del made[at : at + draw.randrange(1, 64)]
        elif what == 4:
            made[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 32)))
        elif what == 5:
            kind = draw.choice("<H <I <Q >H >I >Q".split())
            number = draw.choice(_NUMBERS) % 2 ** (8 * struct.calcsize(kind))
            made[at : at + struct.calcsize(kind)] = struct.pack(kind, number)
        else:
            other = draw.randrange(len(made))
            made[at:at] = made[other : other + draw.randrange(1, 128)]
    return bytes(made)


def _break_zarr(path: Path, draw: random.Random) -> None:
    """Change a value of the metadata, or the bytes of one of the files."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    file = draw.choice([p for p in files if p.suffix == ".json" or p.name.startswith(".")] or files)
    what = draw.random()
    if what < 0.1:
        chunk = draw.choice(files)
        chunk.write_bytes(_broken_bytes(chunk.read_bytes(), draw))
    elif what < 0.2:
        draw.choice(files).unlink()
    elif what < 0.35:
        file.write_bytes(_broken_bytes(file.read_bytes(), draw))
    else:
        document = json.loads(file.read_text())
        for _ in range(draw.choice((1, 1, 2))):
            _change(document, draw)
        file.write_text(json.dumps(document))


def _change(document: object, draw: random.Random) -> None:
    """Change one value somewhere inside a document."""
    here = document
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here))) if isinstance(here, list) else []
        if not keys:
            return
        key = draw.choice(keys)
        inside = here[key]  # type: ignore[index]
        if isinstance(inside, (dict, list)) and inside and draw.random() < 0.8:
            here = inside
            continue
        if draw.random() < 0.25 and isinstance(here, dict):
            del here[key]
        else:
            here[key] = draw.choice(_VALUES)  # type: ignore[index]
        return


def _tif(folder: Path, draw: random.Random) -> Path:
    path = folder / "a.tif"
    shape = draw.choice(((70, 90, 3), (70, 90), (3, 40, 50)))
    options: dict[str, object] = {"photometric": "rgb" if shape[-1] == 3 else "minisblack"}
    if draw.random() < 0.8:
        options["tile"] = (32, 32)
    if draw.random() < 0.6:
        options["compression"] = "zlib"
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with tifffile.TiffWriter(path, bigtiff=draw.random() < 0.3, ome=draw.random() < 0.2) as file:
        file.write(pixels, **options)
        if len(shape) == 3 and shape[-1] == 3:
            file.write(pixels[::2, ::2], subfiletype=1, **options)
    return path


def _png(folder: Path, draw: random.Random) -> Path:
    from PIL import Image

    form = draw.choice(("png", "jpg", "bmp"))
    path = folder / f"a.{form}"
    mode = draw.choice(("RGB", "L"))
    shape = (40, 50, 3) if mode == "RGB" else (40, 50)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8)).save(path)
    return path


def _npy(folder: Path, draw: random.Random) -> Path:
    path = folder / "a.npy"
    kind = draw.choice(("u1", ">u2", "<f4", "<c8", "?", "O", "M8[s]", "S4", "<f2"))
    array = np.zeros((3, 20, 30), kind)
    np.save(path, array, allow_pickle=kind == "O")
    return path


def _zarr(folder: Path, draw: random.Random) -> Path:
    import zarr

    path = folder / "a.zarr"
    shutil.rmtree(path, ignore_errors=True)
    version = draw.choice((2, 3))
    if draw.random() < 0.4:
        array = zarr.create_array(str(path), shape=(3, 40, 50), chunks=(3, 16, 16), dtype="uint8", zarr_format=version)
        array[:] = 7
        return path
    group = zarr.create_group(str(path), zarr_format=version)
    for level in range(2):
        size = (3, 40 >> level, 50 >> level)
        group.create_array(str(level), shape=size, chunks=(3, 16, 16), dtype="uint8")[:] = 7
    axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space", "unit": "micrometer"} for n in "yx")]
    scale = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    datasets = [{"path": str(n), "coordinateTransformations": scale} for n in range(2)]
    multiscales = [{"axes": axes, "datasets": datasets, "version": "0.4"}]
    group.attrs.update({"multiscales": multiscales} if version == 2 else {"ome": {"multiscales": multiscales}})
    return path


def _csv(folder: Path, draw: random.Random) -> Path:
    for name in ("a", "b"):
        np.save(folder / f"{name}.npy", np.zeros((3, 8, 8), np.uint8))
    path = folder / "t.csv"
    separator = draw.choice(",;\t")
    labels = draw.choice((("0", "1"), ("tall", "low"), ("0.5", "1e3"), ("gr\u00fcn", "\u4e2d"), ("nan", "inf")))
    rows = [("path", "label", "mask"), ("a.npy", labels[0], "b.npy"), ("b.npy", labels[1], "")]
    text = "\n".join(separator.join(row) for row in rows) + "\n"
    path.write_bytes(text.encode(draw.choice(("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030"))))
    return path


_WRITE: dict[str, Callable[[Path, random.Random], Path]] = {
    "tif": _tif,
    "png": _png,
    "npy": _npy,
    "zarr": _zarr,
    "csv": _csv,
}
