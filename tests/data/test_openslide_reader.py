"""What OpenSlide gives, tile by tile: the pixels of each level, glass where nothing was scanned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.data import DataError, Scene, write_slide
from outcore.data.openslide_reader import OpenSlideReader, _number

pytest.importorskip("openslide")
pytest.importorskip("tifffile")


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene((1300, 1100), (0, 1), 0.5, tile=64)


@pytest.fixture(scope="module")
def reader(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> OpenSlideReader:
    return OpenSlideReader(write_slide(tmp_path_factory.mktemp("slide") / "s.tif", scene))


def test_levels_and_resolution_are_those_of_the_file(reader: OpenSlideReader, scene: Scene) -> None:
    layout = reader.layout
    assert [level.size for level in layout.levels] == list(scene.levels)
    assert [round(level.downsample) for level in layout.levels] == [4**n for n in range(len(scene.levels))]
    assert (layout.channels, layout.dtype) == (3, np.dtype(np.uint8))


@pytest.mark.parametrize("level", [0, 1])
def test_tiles_are_the_pixels_of_their_level(reader: OpenSlideReader, scene: Scene, level: int) -> None:
    height, width = scene.levels[level]
    for top in range(0, height, 1024):
        for left in range(0, width, 1024):
            box = [(top, min(top + 1024, height)), (left, min(left + 1024, width))]
            found = reader.tile(level, (top // 1024, left // 1024))
            assert found is not None and np.array_equal(np.moveaxis(found, 0, -1), scene.region(box, level=level))


def test_what_was_never_scanned_is_white_and_half_of_it_half(reader: OpenSlideReader, monkeypatch: Any) -> None:
    height, width = reader.layout.levels[0].size[0] - 1024, reader.layout.levels[0].size[1] - 1024
    rgba = np.zeros((height, width, 4), np.uint8)
    asked = []

    class Slide:
        def read_region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Any:
            asked.append((corner, level, size))
            return rgba

    monkeypatch.setattr(reader, "_slide", Slide())
    assert reader.tile(0, (1, 1)) is None
    assert asked == [((1024, 1024), 0, (width, height))]
    rgba[0, 0] = (10, 20, 30, 255)
    rgba[0, 1] = (100, 0, 255, 51)  # a fifth of it is there
    found = reader.tile(0, (1, 1))
    assert found is not None
    assert found[:, 0, 0].tolist() == [10, 20, 30]
    assert found[:, 0, 1].tolist() == [224, 204, 255]
    assert (found[:, 1:] == 255).all()


def test_a_resolution_that_is_no_number_is_none() -> None:
    assert _number("0.25") == 0.25
    assert [_number(text) for text in (None, "", "fine", "nan", "inf", "0", "-1")] == [None] * 7


def test_what_is_no_slide_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.svs").write_bytes(b"not a slide")
    with pytest.raises(DataError, match=r"s.svs cannot be opened as a slide: .*; is it complete"):
        OpenSlideReader(tmp_path / "s.svs")
