"""Synthetic slides: a formula, files that agree with it, and labels that no patch knows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.data import DataError, Scene, open_slide, read_table, write_slide, write_slides, write_volume
from outcore.data.scene import GLASS


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8, 0.9, 1.0])
def test_the_share_of_tissue_is_what_was_asked_for(share: float) -> None:
    scene = Scene((4096, 4096), share=share, tile=64)
    tissue = (scene.what([(0, 1024), (0, 1024)], level=1) != GLASS).mean()
    assert tissue == pytest.approx(share, abs=0.02)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_window_narrower_than_the_gap_is_equally_likely_under_both_labels(data: st.DataObject) -> None:
    seed, share = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    kinds = list(itertools.product((0, 1), repeat=2))
    scenes = [Scene((512, 768), pair, share, seed, tile=32) for pair in kinds]
    width = data.draw(st.integers(1, scenes[0].gap))
    height = data.draw(st.integers(1, 512))
    top, left = data.draw(st.integers(0, 512 - height)), data.draw(st.integers(0, 768 - width))
    seen: dict[int, list[bytes]] = {0: [], 1: []}
    for scene in scenes:
        seen[scene.label].append(scene.region([(top, top + height), (left, left + width)]).tobytes())
    assert sorted(seen[0]) == sorted(seen[1])


def test_the_whole_image_knows_its_label() -> None:
    scenes = [Scene((256, 256), pair, 0.3, tile=32) for pair in itertools.product((0, 1), repeat=2)]
    found = [len({int(kind) for kind in np.unique(s.what([(0, 256), (0, 256)])) if kind != GLASS}) - 1 for s in scenes]
    assert found == [s.label for s in scenes] == [0, 1, 1, 0]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_what_a_whole_box_shows_is_what_every_pixel_shows(data: st.DataObject) -> None:
    scene = Scene((1400, 1300), share=data.draw(st.sampled_from([0.05, 0.4, 1.0])), seed=data.draw(st.integers(0, 9)))
    level = data.draw(st.integers(0, 1))
    height, width = scene.levels[level]
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = [(top, min(height, top + data.draw(st.integers(1, 200)))), (left, min(width, left + 64))]
    shown = np.unique(scene.what(box, level))
    answer = scene.uniform(box, level)
    if answer is not None:
        assert shown.tolist() == [answer]
    else:
        assert len(shown) > 1 or scene.share == 1.0


def test_no_large_part_repeats_itself() -> None:
    scene = Scene((1024, 1024), share=1.0, tile=32)
    parts = {scene.region([(y, y + 128), (x, x + 128)]).tobytes() for y in range(0, 1024, 128) for x in (128, 256)}
    assert len(parts) == 16


@pytest.mark.parametrize("compression", ["deflate", "jpeg"])
def test_a_file_holds_what_the_formula_says(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("imagecodecs") if compression == "jpeg" else None
    scene = Scene((2100, 1700), share=0.5, seed=5, tile=256)
    slide = open_slide(write_slide(tmp_path / "s.tif", scene, compression=compression))  # type: ignore[arg-type]
    assert [level.size for level in slide.levels] == list(scene.levels) == [(2100, 1700), (525, 425)]
    assert slide.microns_per_pixel == pytest.approx(0.25)
    for level, (height, width) in enumerate(scene.levels):
        read = slide.at(level=level).read([(0, 3), (0, height), (0, width)]).permute(1, 2, 0).numpy()
        off = np.abs(read.astype(int) - scene.region([(0, height), (0, width)], level))
        assert off.max() == 0 if compression == "deflate" else off.mean() < 4


def test_openslide_reads_the_same_pixels(tmp_path: Path) -> None:
    openslide = pytest.importorskip("openslide")
    scene = Scene((2100, 1700), share=0.5, seed=5, tile=256)
    with openslide.OpenSlide(str(write_slide(tmp_path / "s.tif", scene))) as slide:
        assert slide.level_count == 2
        read = np.asarray(slide.read_region((300, 200), 0, (900, 800)))[..., :3]
    assert np.array_equal(read, scene.region([(200, 1000), (300, 1200)]))


def test_a_mask_holds_the_answer(tmp_path: Path) -> None:
    scene = Scene((700, 600), share=0.5, tile=64)
    mask = open_slide(write_slide(tmp_path / "m.tif", scene, mask=True))
    assert mask.shape == (1, 700, 600)
    assert np.array_equal(mask.read([(0, 1), (0, 700), (0, 600)])[0].numpy(), scene.mask([(0, 700), (0, 600)]))


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_volume_is_a_file_too(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("zarr") if suffix == ".zarr" else None
    scene = Scene((40, 50, 60), share=0.4, tile=16)
    volume = open_slide(write_volume(tmp_path / f"v{suffix}", scene))
    assert volume.shape == (1, 40, 50, 60) and volume.blank == 0
    box = [(3, 33), (20, 41), (7, 60)]
    assert np.array_equal(volume.read([(0, 1), *box])[0].numpy(), scene.region(box)[..., 0])
    assert 0.3 < (scene.what([(0, 40), (0, 50), (0, 60)]) != GLASS).mean() < 0.5


def test_a_slide_can_be_an_array(tmp_path: Path) -> None:
    scene = Scene((90, 70), share=0.4, tile=32)
    slide = open_slide(write_volume(tmp_path / "s.npy", scene))
    read = slide.read([(0, 3), (0, 90), (0, 70)]).permute(1, 2, 0).numpy()
    assert np.array_equal(read, scene.region([(0, 90), (0, 70)])) and read.std() > 0


def test_a_data_set_has_every_combination_equally_often(tmp_path: Path) -> None:
    table = read_table(write_slides(tmp_path, 8, size=(96, 128), tile=32, masks=True))
    assert sorted(row.label for row in table.rows if row.label is not None) == [0] * 4 + [1] * 4
    example = table[3]
    assert example.image.shape == (3, 96, 128) and example.mask is not None and example.mask.shape == (1, 96, 128)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"size": (9,)}, "two or three"), ({"share": 0.0}, "above 0"), ({"tile": 48}, "power of two")],
)
def test_an_impossible_scene_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Scene(**{"size": (64, 64), **wrong})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_slide_of_a_hundred_thousand_pixels_takes_little_memory(tmp_path: Path) -> None:
    import resource

    scene = Scene((100_000, 100_000), share=0.2)
    scene.region([(0, 512), (0, 512)], level=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slide = open_slide(write_slide(tmp_path / "large.tif", scene))
    assert slide.shape == (3, 100_000, 100_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
    box = [(61_000, 62_000), (20_000, 21_500)]
    assert np.array_equal(slide.read([(0, 3), *box]).permute(1, 2, 0).numpy(), scene.region(box))
