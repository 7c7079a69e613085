"""Which images of a TIFF are levels of one pyramid: smaller ones of the same kind, all sides by the same factor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outcore.data import open_slide

tifffile = pytest.importorskip("tifffile")


def written(path: Path, *shapes: tuple[int, ...], dtype: str = "uint8") -> list[tuple[int, int]]:
    """Images one after the other in a file; the sizes of the levels that are found."""
    with tifffile.TiffWriter(path) as file:
        for n, shape in enumerate(shapes):
            kind = "uint16" if dtype == "mixed" and n else "uint8"
            file.write(np.zeros(shape, kind), tile=(16, 16), photometric="rgb" if len(shape) == 3 else "minisblack")
    return [tuple(level.size) for level in open_slide(path).levels]


def test_images_that_follow_are_levels_where_they_are_smaller_by_one_factor(tmp_path: Path) -> None:
    assert written(tmp_path / "a.tif", (64, 96, 3), (32, 48, 3), (16, 24, 3)) == [(64, 96), (32, 48), (16, 24)]
    rounded = written(tmp_path / "b.tif", (65, 97, 3), (32, 48, 3), (16, 24, 3))
    assert rounded == [(65, 97), (32, 48), (16, 24)], "sides that cannot be halved are rounded"


def test_the_first_image_of_another_kind_ends_the_pyramid(tmp_path: Path) -> None:
    assert written(tmp_path / "a.tif", (64, 96, 3), (32, 96, 3), (16, 24, 3)) == [(64, 96)], "only one side is smaller"
    assert written(tmp_path / "b.tif", (64, 96, 3), (128, 192, 3)) == [(64, 96)], "a larger one"
    assert written(tmp_path / "c.tif", (64, 96, 3), (32, 48)) == [(64, 96)], "a mask"
    assert written(tmp_path / "d.tif", (64, 96, 3), (32, 48, 3), dtype="mixed") == [(64, 96)], "other numbers"
    levels = written(tmp_path / "e.tif", (64, 96, 3), (32, 48, 3), (48, 72, 3), (16, 24, 3))
    assert levels == [(64, 96), (32, 48)], "a thumbnail that is larger than the level before"
