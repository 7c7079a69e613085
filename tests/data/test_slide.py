"""Every format gives the pixels that were written, by level or by resolution, from any thread; damage is named."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.data import DataError, Scene, Slide, open_slide, tile_cache, write_slide
from outcore.data.cache import Handles, TileCache
from outcore.data.resample import Resampled
from outcore.data.source import ArraySource
from outcore.data.tiff_reader import inflated


def colours(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def everything(slide: Slide, level: int = 0) -> np.ndarray:
    source = slide.at(level=level)
    return source.read([(0, n) for n in source.shape]).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"tile": (64, 64)},
        {"tile": (64, 32), "compression": "zlib"},
        {"rowsperstrip": 16},
        {"tile": (64, 64), "planarconfig": "separate"},
        {"tile": (64, 64), "compression": "zlib", "predictor": True},
    ],
    ids=["tiles", "deflate", "strips", "planes", "predictor"],
)
@pytest.mark.parametrize("alone", [False, True])
def test_any_tiff_layout(tmp_path: Path, options: dict[str, object], alone: bool) -> None:
    image = colours(150, 210)
    written = image.transpose(2, 0, 1) if "planarconfig" in options else image
    tifffile.imwrite(tmp_path / "a.tif", written, photometric="rgb", **options)
    slide = open_slide(tmp_path / "a.tif")
    slide._reader()._inflates = alone  # type: ignore[attr-defined]  # as without imagecodecs
    assert np.array_equal(everything(slide), image.transpose(2, 0, 1))


def test_a_tile_that_inflates_to_too_little_is_said() -> None:
    assert inflated(zlib.compress(b"12345678"), (2, 2, 2))[1, 0].tobytes() == b"56"
    with pytest.raises(DataError, match="4 of its 8 bytes"):
        inflated(zlib.compress(b"1234"), (2, 2, 2))


def test_an_ome_tiff_with_channels_and_levels_below_its_first_image(tmp_path: Path) -> None:
    image = np.random.default_rng(1).integers(0, 60_000, (4, 256, 320), np.uint16)
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        meta = {"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
        file.write(image, subifds=1, tile=(64, 64), metadata=meta)
        file.write(image[:, ::2, ::2], subfiletype=1, tile=(64, 64))
    slide = open_slide(tmp_path / "a.ome.tif")
    assert slide.dtype is torch.uint16 and slide.microns_per_pixel == 0.5
    assert np.array_equal(everything(slide), image)
    assert np.array_equal(everything(slide, level=1), image[:, ::2, ::2])


def test_a_stack_of_tiff_pages_is_a_volume(tmp_path: Path) -> None:
    volume = np.random.default_rng(2).integers(0, 256, (6, 40, 50), np.uint8)
    tifffile.imwrite(tmp_path / "v.tif", volume, photometric="minisblack", metadata={"axes": "ZYX"}, ome=True)
    slide = open_slide(tmp_path / "v.tif")
    assert slide.shape == (1, 6, 40, 50)
    assert np.array_equal(slide.read([(0, 1), (2, 5), (10, 20), (0, 50)])[0].numpy(), volume[2:5, 10:20])


@pytest.mark.parametrize("version", [2, 3])
def test_an_ome_zarr_pyramid(tmp_path: Path, version: int) -> None:
    zarr = pytest.importorskip("zarr")
    image = colours(300, 200).transpose(2, 0, 1)
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=version)
    for name, step in (("0", 1), ("1", 2)):
        part = image[:, ::step, ::step]
        group.create_array(name, shape=part.shape, chunks=(1, 64, 64), dtype="uint8")[:] = part
    axes = [{"name": "c"}, *({"name": n, "unit": "micrometer"} for n in "yx")]
    scale = [{"type": "scale", "scale": [1, 0.5, 0.5]}]
    sets = [{"path": "0", "coordinateTransformations": scale}, {"path": "1"}]
    scales = {"multiscales": [{"axes": axes, "datasets": sets}]}
    group.attrs.update(scales if version == 2 else {"ome": scales})
    slide = open_slide(tmp_path / "a.zarr")
    assert slide.microns_per_pixel == 0.5 and [v.size for v in slide.levels] == [(300, 200), (150, 100)]
    assert np.array_equal(everything(slide), image)
    assert np.array_equal(everything(slide, level=1), image[:, ::2, ::2])


def test_arrays_and_ordinary_images(tmp_path: Path) -> None:
    from PIL import Image

    image = colours(90, 120)
    Image.fromarray(image).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", image.transpose(2, 0, 1))
    given = [tmp_path / "a.png", tmp_path / "a.npy", image.transpose(2, 0, 1), torch.from_numpy(image).permute(2, 0, 1)]
    for source in given:
        assert np.array_equal(everything(open_slide(source)), image.transpose(2, 0, 1))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_resampling_is_the_mean_of_the_area_and_has_no_seams(data: st.DataObject) -> None:
    image = np.random.default_rng(3).random((1, 37, 41))
    factor = data.draw(st.floats(1.0, 6.0))
    source = Resampled(ArraySource(image), factor)
    _, height, width = source.shape
    box = [(0, 1), (0, 0), (0, 0)]
    for dim, size in ((1, height), (2, width)):
        start = data.draw(st.integers(0, size - 1))
        box[dim] = (start, data.draw(st.integers(start + 1, size)))
    whole = source.read([(0, 1), (0, height), (0, width)])
    assert torch.equal(source.read(box), whole[:, slice(*box[1]), slice(*box[2])])
    y, x = box[1][0], box[2][0]
    fine = 200
    at = lambda i, n: np.minimum(((i + (np.arange(fine) + 0.5) / fine) * factor).astype(int), n - 1)  # noqa: E731
    expected = image[0][np.ix_(at(y, 37), at(x, 41))].mean()
    assert float(whole[0, y, x]) == pytest.approx(expected, abs=0.02)


def test_regions_by_microns_take_the_nearest_finer_level(tmp_path: Path) -> None:
    scene = Scene((2048, 2048), share=0.6, tile=128)
    slide = open_slide(write_slide(tmp_path / "s.tif", scene))
    coarse = slide.region((100, 60), (30, 40), microns_per_pixel=1.0)
    assert torch.equal(coarse, slide.region((100, 60), (30, 40), level=1))
    half = slide.region((10, 20), (16, 8), microns_per_pixel=0.5)
    exact = scene.region([(20, 52), (40, 56)]).reshape(16, 2, 8, 2, 3).mean(axis=(1, 3))
    assert np.abs(half.permute(1, 2, 0).numpy() - exact).max() <= 0.5
    with pytest.raises(DataError, match=r"0\.1 is finer than scanned"):
        slide.at(microns_per_pixel=0.1)
    with pytest.raises(DataError, match="levels 0 to 1"):
        slide.at(level=2)


def test_beyond_the_border_is_white() -> None:
    slide = open_slide(np.zeros((3, 10, 10), np.uint8))
    read = slide.region((-2, 5), (4, 10))
    assert (read[:, 2:, :5] == 0).all() and (read[:, :2] == 255).all() and (read[:, :, 5:] == 255).all()


def test_tiles_that_were_never_written_are_white(tmp_path: Path) -> None:
    scene = Scene((600, 800), share=0.3, tile=64)
    sparse = open_slide(write_slide(tmp_path / "sparse.tif", scene, sparse=True))
    assert (tmp_path / "sparse.tif").stat().st_size < write_slide(tmp_path / "full.tif", scene).stat().st_size
    assert np.array_equal(everything(sparse).transpose(1, 2, 0), scene.region([(0, 600), (0, 800)]))


def test_many_threads_read_one_slide(tmp_path: Path) -> None:
    scene = Scene((1024, 1024), share=0.6, tile=64)
    slide = open_slide(write_slide(tmp_path / "s.tif", scene))
    boxes = [[(y, y + 200), (x, x + 130)] for y in range(0, 800, 100) for x in range(0, 850, 90)]
    with ThreadPoolExecutor(8) as threads:
        for box, read in zip(boxes, threads.map(lambda b: slide.read([(0, 3), *b]), boxes), strict=True):
            assert np.array_equal(read.permute(1, 2, 0).numpy(), scene.region(box))


def _corner(slide: Slide) -> list[list[int]]:
    return slide.read([(0, 3), (100, 101), (100, 104)])[:, 0].tolist()


@pytest.mark.slow
def test_a_slide_goes_to_other_processes(tmp_path: Path) -> None:
    slide = open_slide(write_slide(tmp_path / "s.tif", Scene((512, 512), share=0.9, tile=64)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_corner, (slide,)) == _corner(slide)


def test_a_copy_of_a_slide_opens_its_own_file(tmp_path: Path) -> None:
    slide = open_slide(write_slide(tmp_path / "s.tif", Scene((512, 512), share=0.9, tile=64)))
    copy = pickle.loads(pickle.dumps(slide))
    assert _corner(copy) == _corner(slide)


def test_the_cache_is_bounded_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slide = open_slide(write_slide(tmp_path / "s.tif", Scene((1024, 1024), share=0.6, tile=64)))
    tile_cache.clear()
    monkeypatch.setattr(tile_cache, "limit_bytes", 10 * 64 * 64 * 3)
    everything(slide)
    assert 0 < tile_cache.held_bytes <= tile_cache.limit_bytes
    boxes = [[(0, 3), (row, row + 64), (column, column + 64)] for row in range(0, 1024, 64) for column in (64, 128)]
    tissue = next(box for box in boxes if slide.colour(box) is None)  # of glass, the colour is remembered
    for _ in range(2):
        hits = tile_cache.hits
        slide.read(tissue)
    assert tile_cache.hits == hits + 1


def test_the_colour_of_glass_is_known_once_it_was_read(tmp_path: Path) -> None:
    slide = open_slide(write_slide(tmp_path / "s.tif", Scene((1024, 1024), share=0.3, tile=64)))
    pixels = everything(slide)
    glass = [(0, 3), (0, 130), (3, 64)]
    again = open_slide(tmp_path / "s.tif")
    assert again.colour(glass) is None  # nobody has looked
    np.testing.assert_array_equal(again.read(glass).numpy(), pixels[:, 0:130, 3:64])
    for side in (64, 100):
        for row in range(0, 1024 - side, 61):
            for column in range(0, 1024 - side, 61):
                box = pixels[:, row : row + side, column : column + side].reshape(3, -1)
                found = slide.colour([(0, 3), (row, row + side), (column, column + side)])
                assert found is None or box.min(1).tolist() == list(found) == box.max(1).tolist()
    assert slide.colour(glass) == again.colour(glass) == tuple(pixels[:, 0, 3].tolist())
    assert slide.colour([(1, 2), *glass[1:]]) == (int(pixels[1, 0, 3]),)
    assert slide.colour([(0, 3), (0, 1024), (0, 1024)]) is None
    misses = tile_cache.misses
    np.testing.assert_array_equal(slide.read(glass).numpy(), pixels[:, 0:130, 3:64])
    assert tile_cache.misses == misses


def test_few_files_are_open_and_the_oldest_is_let_go() -> None:
    opened: list[str] = []
    kept = Handles[str](limit=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        kept.get(key, lambda key=key: opened.append(key) or key)  # type: ignore[misc]
    assert opened == ["a", "b", "c", "b"]


def test_a_tile_larger_than_the_cache_is_not_kept() -> None:
    cache = TileCache(limit_bytes=10)
    cache.put("a", np.zeros(11, np.uint8))
    assert cache.get("a") is None and cache.held_bytes == 0


def damaged(path: Path, index: int) -> Path:
    """Overwrite the bytes of one tile."""
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[index], file.pages[0].databytecounts[index]
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * count)
    return path


def test_a_damaged_tile_is_named(tmp_path: Path) -> None:
    slide = open_slide(damaged(write_slide(tmp_path / "s.tif", Scene((256, 256), share=1.0, tile=64)), 6))
    slide.read([(0, 3), (0, 64), (0, 256)])
    with pytest.raises(DataError, match=r"s\.tif: tile \(1, 2\) of level 0 cannot be read.*on_damage='white'"):
        everything(slide)


def test_a_damaged_tile_can_be_read_as_glass_and_is_counted_once(tmp_path: Path) -> None:
    scene = Scene((256, 256), share=1.0, tile=64)
    slide = open_slide(damaged(write_slide(tmp_path / "s.tif", scene), 6), on_damage="white")
    expected = scene.region([(0, 256), (0, 256)]).copy()
    expected[64:128, 128:192] = 255
    for _ in range(2):
        assert np.array_equal(everything(slide).transpose(1, 2, 0), expected)
    assert [(tile.level, tile.index) for tile in slide.damage] == [(0, (1, 2))]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_slide(tmp_path / "s.tif", Scene((256, 256), share=1.0, tile=64))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"s\.tif.*(truncated|complete|cannot be read)"):
        everything(open_slide(path))
    path.write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"s\.tif"):
        open_slide(path)


@pytest.mark.parametrize("name", ["absent.tif", "words.tif", "words.svs", "words.png", "words.npy", "a.docx"])
def test_what_is_no_slide_is_refused_by_name(tmp_path: Path, name: str) -> None:
    if name != "absent.tif":
        (tmp_path / name).write_text("these are words")
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        open_slide(tmp_path / name)


def test_equal_bytes_of_tiles_are_decoded_once_and_what_lies_beyond_the_end_does_not_count(tmp_path: Path) -> None:
    pixels = np.full((300, 420, 3), 200, np.uint8)
    pixels[130:150, 10:20] = 7
    tifffile.imwrite(tmp_path / "s.tif", pixels, tile=(64, 64), compression="zlib", photometric="rgb")
    slide = open_slide(tmp_path / "s.tif")
    np.testing.assert_array_equal(everything(slide), pixels.transpose(2, 0, 1))
    assert 1 < len(slide._reader()._met) <= 8  # glass inside, at both ends and in the corner; the mark
    assert slide.colour([(0, 3), (192, 300), (0, 420)]) == (200, 200, 200)  # whatever lies beyond the end
    assert slide.colour([(0, 3), (100, 300), (0, 420)]) is None


def test_a_slide_that_is_freed_by_the_thread_that_opens_another_does_not_wait_for_it() -> None:
    files: Handles[str] = Handles()
    files.get("old", lambda: "old")

    def opened() -> str:
        freeing = threading.Thread(target=files.drop, args=("old",), daemon=True)
        freeing.start()
        freeing.join(10)
        assert not freeing.is_alive()
        return "new"

    assert files.get("new", opened) == "new"
    assert files.get("old", lambda: "again") == "again"


@pytest.mark.parametrize(("unit", "microns"), [("nm", 0.00025), ("mm", 250.0), ("µm", 0.25), (None, 0.25)])
def test_the_resolution_of_ome_metadata_has_its_unit(tmp_path: Path, unit: str | None, microns: float) -> None:
    metadata = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25}
    if unit is not None:
        metadata |= {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    path = tmp_path / "slide.ome.tif"
    tifffile.imwrite(path, colours(64, 96), ome=True, photometric="rgb", tile=(64, 64), metadata=metadata)
    assert open_slide(path).microns_per_pixel == pytest.approx(microns)


def test_a_slide_in_words_has_its_sizes_and_its_resolution_where_that_is_known(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", colours(40, 60), tile=(16, 16))
    assert repr(open_slide(tmp_path / "a.tif")).endswith("a.tif: 60 x 40; 3 channels of uint8)")
    tifffile.imwrite(
        tmp_path / "b.tif", colours(40, 60), tile=(16, 16), resolution=(40000, 40000), resolutionunit="CENTIMETER"
    )
    assert repr(open_slide(tmp_path / "b.tif")).endswith("channels of uint8, 0.25 µm per pixel)")
