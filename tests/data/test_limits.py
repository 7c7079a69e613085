"""What a file claims is checked before memory is taken for it; what is not a file is said."""

from __future__ import annotations

import json
import os
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from PIL import Image

from outcore.data import DataError, open_slide, read_table
from outcore.data.limits import limits
from outcore.infer.process_memory import ProcessMemory


@pytest.mark.parametrize("name", ["a.tif", "a.png", "a.npy", "a.svs", "a.zarr", "a.mrxs"])
def test_a_pipe_a_socket_a_device_or_a_folder_is_not_a_slide(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is a pipe, a socket or a device, not a file"):
        open_slide(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is a pipe, a socket or a device, not a file"):
        open_slide(tmp_path / name)
    (tmp_path / name).unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / name))
        with pytest.raises(DataError, match="is a pipe, a socket or a device, not a file"):
            open_slide(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"is a folder, not a slide|cannot be opened as Zarr"):
        open_slide(tmp_path / name)
    with pytest.raises(DataError, match="no file"):
        open_slide(tmp_path / ("x" * 300 + name))


def test_a_table_that_is_no_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"not a file: .*t\.csv"):
        read_table(tmp_path / "t.csv")


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [12_000, 20_000, 2**31 - 1])
def test_an_image_that_claims_to_be_huge_is_refused_by_its_header(tmp_path: Path, side: int) -> None:
    (tmp_path / "a.png").write_bytes(png_claiming(side, side))
    with ProcessMemory() as held, limits.at_most(64 << 20), pytest.raises(DataError, match=r"takes|cannot be read"):
        open_slide(tmp_path / "a.png")
    assert held.peak_bytes is None or held.peak_bytes - (held.before_bytes or 0) < 64 << 20


def test_a_zarr_that_claims_a_huge_chunk_is_refused(tmp_path: Path) -> None:
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(64, 64), chunks=(64, 64), dtype="uint8")
    array[:] = 1
    document = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [2**20, 2**20]
    (tmp_path / "a.zarr/zarr.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"a chunk of 1048576 x 1048576 takes 1\.0 TiB, the limit is 1\.0 GiB"):
        open_slide(tmp_path / "a.zarr")


def test_too_many_tiles_are_refused(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(2**24, 2**24), chunks=(256, 256), dtype="uint8")
    with pytest.raises(DataError, match=r"4,294,967,296 tiles of 256 x 256 px"):
        open_slide(tmp_path / "a.zarr")


@pytest.mark.parametrize("alone", [False, True])
def test_a_tile_that_inflates_to_far_more_than_it_says_takes_no_memory(tmp_path: Path, alone: bool) -> None:
    squeezed = zlib.compressobj(9)
    packed = b"".join(squeezed.compress(bytes(1 << 20)) for _ in range(300)) + squeezed.flush()
    options: dict[str, Any] = {"shape": (64, 64, 3), "dtype": np.uint8, "tile": (64, 64), "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "a.tif", iter([packed]), compression="adobe_deflate", **options)
    slide = open_slide(tmp_path / "a.tif")
    slide._reader()._inflates = alone  # type: ignore[attr-defined]
    with ProcessMemory() as held:
        try:
            slide.region((0, 0), (64, 64))
        except DataError as error:
            assert "cannot be read" in str(error)
    assert held.peak_bytes is None or held.peak_bytes - (held.before_bytes or 0) < 64 << 20


def test_a_tile_that_claims_more_bytes_than_the_file_has_is_said(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64, 3), np.uint8), tile=(64, 64), photometric="rgb")
    slide = open_slide(tmp_path / "a.tif")
    slide._reader()._levels[0].pages[0].keyframe.databytecounts = (1 << 40,)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"bytes are there; the file is truncated"):
        slide.region((0, 0), (64, 64))


def test_numbers_in_another_byte_order_and_of_sixteen_bits_stay_what_they_are(tmp_path: Path) -> None:
    numbers = np.arange(40 * 50, dtype=np.uint16).reshape(40, 50) * 30
    np.save(tmp_path / "a.npy", numbers.astype(">u2"))
    Image.fromarray(numbers).save(tmp_path / "a.png")
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(40, 50), chunks=(16, 16), dtype=">u2", zarr_format=2)
    array[:] = numbers
    for name in ("a.npy", "a.png", "a.zarr"):
        slide = open_slide(tmp_path / name)
        assert slide.dtype is torch.uint16, name
        assert np.array_equal(slide.read([(0, 1), (0, 40), (0, 50)])[0].numpy(), numbers), name


@pytest.mark.parametrize("kind", ["<c8", "M8[s]", "S4", "V8"])
def test_numbers_that_are_no_pixels_are_refused(tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 8), kind))
    with pytest.raises(DataError, match="holds numbers of type"):
        open_slide(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"multiscales": 7}, r"ome\.multiscales in its metadata is 7; needed is a list"),
        ({"multiscales": []}, r"no ome\.multiscales\[0\]"),
        ({"multiscales": [{"axes": [{"name": "y"}]}]}, r"no ome\.multiscales\[0\]\.datasets; needed is a list"),
        ({"multiscales": [{"axes": ["y"], "datasets": []}]}, r"axes\[0\] in its metadata is 'y'; needed is an object"),
        (
            {"multiscales": [{"axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": "../../b.zarr"}]}]},
            r"the level '\.\./\.\./b\.zarr' in its metadata does not lie inside of it",
        ),
        (
            {"multiscales": [{"axes": [{"name": "x"}, {"name": "x"}], "datasets": [{"path": "0"}]}]},
            r"axes 'xx'; an image ends in y, x",
        ),
    ],
)
def test_metadata_of_an_image_is_read_with_the_types_it_must_have(tmp_path: Path, change: Any, said: str) -> None:
    group = zarr.create_group(str(tmp_path / "a.zarr"))
    group.create_array("0", shape=(40, 50), chunks=(16, 16), dtype="uint8")
    group.attrs["ome"] = change
    with pytest.raises(DataError, match=said):
        open_slide(tmp_path / "a.zarr")


def test_a_file_that_is_refused_is_closed(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 64), "c8"), tile=(64, 64))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DataError, match="holds numbers of type"):
        open_slide(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "t.tif", np.zeros((2, 64, 64), "u1"), metadata={"axes": "TYX"})
    with pytest.raises(DataError, match="has axes"):
        open_slide(tmp_path / "t.tif")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
