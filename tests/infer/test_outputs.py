"""What people who look at slides get: names, probabilities, pyramids that viewers open, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
import torch
from PIL import Image

from outcore.data import Batch, Scene, open_slide, write_slide, write_slides
from outcore.infer.overlay import slide_thumbnail
from outcore.infer.palette import class_colours, heat_colours
from outcore.infer.pyramid import write_pyramid
from outcore.job import Job
from tests.cli.command import outcore_command
from tests.infer.slides import infer, write_work


def logits(folder: Path, slide: str = "slide.tif") -> torch.Tensor:
    from safetensors.torch import load_file

    net = Job.load(str(folder / "job.py")).build().eval()
    net.load_state_dict(load_file(folder / "w.safetensors"))
    with torch.no_grad():
        return net(Batch((open_slide(folder / slide),)).tensor())[0]


def test_weights_are_needed_unless_it_is_said(tmp_path: Path) -> None:
    folder = write_work(tmp_path)
    shown = infer(folder, "--data", "slide.tif", weights=())
    assert shown.returncode == 1 and "infer needs weights" in shown.stderr and "--untrained" in shown.stderr
    assert not (folder / "slide.mask.tif").exists()
    assert infer(folder, "--data", "slide.tif", "--untrained", weights=()).returncode == 0
    assert "contradict" in infer(folder, "--data", "slide.tif", "--untrained").stderr


def test_mask_and_heat_map_are_pyramids_that_openslide_opens(tmp_path: Path) -> None:
    folder = write_work(tmp_path, size=(1400, 2100))
    shown = infer(folder, "--data", "slide.tif", "-o", "mask.tif", "--heat", "1")
    assert shown.returncode == 0, shown.stderr
    expected = logits(folder)
    classes, likely = expected.argmax(0).numpy(), expected.softmax(0)[1].numpy()
    assert len(np.unique(classes)) > 1
    for name, numbers, colours in (
        ("mask.tif", classes, class_colours(3)),
        ("mask.heat.tif", np.round(likely * 255).astype(int), heat_colours()),
    ):
        seen = openslide.OpenSlide(folder / name)
        assert seen.level_count == 3 and seen.level_dimensions[0] == (2100, 1400)
        assert float(seen.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        shown_colours = np.asarray(seen.read_region((0, 0), 0, (2100, 1400)))[..., :3]
        stored = open_slide(folder / name).read([(0, 1), (0, 1400), (0, 2100)])[0].numpy()
        assert (np.abs(stored - numbers.astype(int)) <= (name != "mask.tif")).mean() > 0.9999
        assert np.array_equal(shown_colours, colours[stored])
    small = open_slide(folder / "mask.tif").at(level=1)
    assert np.array_equal(
        small.read([(0, n) for n in small.shape])[0].numpy()[:64, :64], stored_level(folder)[:64, :64]
    )


def stored_level(folder: Path) -> np.ndarray:
    with tifffile.TiffFile(folder / "mask.tif") as file:
        return file.pages[0].asarray()[::2, ::2]


def test_coarser_levels_are_means_for_numbers_and_samples_for_classes(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 200, (1100, 1500), np.uint8)
    for mean in (False, True):
        write_pyramid(tmp_path / "p.tif", numbers, scratch=tmp_path, mean=mean)
        with tifffile.TiffFile(tmp_path / "p.tif") as file:
            assert np.array_equal(file.pages[0].asarray(), numbers)
            quarters = numbers.reshape(550, 2, 750, 2).astype(float)
            expected = quarters.mean((1, 3)).round() if mean else numbers[::2, ::2]
            assert np.array_equal(file.pages[1].asarray(), expected)


def test_the_picture_shows_slide_and_mask(tmp_path: Path) -> None:
    folder = write_work(tmp_path, size=(1400, 2100))
    told = ("--data", "slide.tif", "-o", "mask.tif", "--classes", "glass,tumour,stroma", "--json")
    shown = infer(folder, *told)
    assert shown.returncode == 0, shown.stderr
    with Image.open(json.loads(shown.stdout)["overlay"].join([f"{folder}/", ""])) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] == 1024 and pixels.shape[0] > 683
    plain = slide_thumbnail(open_slide(folder / "slide.tif"))
    classes = logits(folder).argmax(0).numpy()
    rows = (np.arange(683) + 0.5) * 1400 / 683
    columns = (np.arange(1024) + 0.5) * 2100 / 1024
    sampled = classes[rows.astype(int)][:, columns.astype(int)]
    same = (pixels[:683] == plain).all(-1)
    assert same[sampled == 0].mean() > 0.999 and same[sampled != 0].mean() < 0.05
    assert infer(folder, "--data", "slide.tif", "-o", "other.tif", "--no-overlay").returncode == 0
    assert not (folder / "other.overlay.png").exists()


def test_a_slide_without_levels_gives_the_same_small_picture(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (700, 1300, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", tile=(64, 64))
    made = slide_thumbnail(open_slide(tmp_path / "a.tif"), 130)
    assert made.shape == (70, 130, 3)
    assert np.abs(made.astype(int) - image.reshape(70, 10, 130, 10, 3).mean((1, 3))).max() <= 0.51


@pytest.mark.parametrize(("kind", "key", "factor"), [("dict", "out", 1), ("dict", "aux", 2), ("tuple", "1", 2)])
def test_one_of_several_outputs_is_chosen_by_key(tmp_path: Path, kind: str, key: str, factor: int) -> None:
    folder = write_work(tmp_path)
    told = ("--data", "slide.tif", "-a", f"outputs={kind}", "--scores", "-o", "s.npy")
    refused = infer(folder, *told)
    assert refused.returncode == 1 and "returns 2 outputs" in refused.stderr and "--key" in refused.stderr
    unknown = infer(folder, *told, "--key", "nothing")
    assert unknown.returncode == 1 and "nothing" in unknown.stderr and "Traceback" not in unknown.stderr
    shown = infer(folder, *told, "--key", key)
    assert shown.returncode == 0, shown.stderr
    np.testing.assert_allclose(np.load(folder / "s.npy"), factor * logits(folder).numpy(), atol=1e-4)


def test_probabilities_of_a_map_sum_to_one(tmp_path: Path) -> None:
    folder = write_work(tmp_path)
    assert infer(folder, "--data", "slide.tif", "--probabilities", "-o", "p.npy").returncode == 0
    np.testing.assert_allclose(np.load(folder / "p.npy"), logits(folder).softmax(0).numpy(), atol=1e-5)
    both = infer(folder, "--data", "slide.tif", "--probabilities", "--scores", "-o", "q.npy")
    assert both.returncode == 1 and "contradict" in both.stderr


def test_classes_are_written_as_a_table_only(tmp_path: Path) -> None:
    folder = write_work(tmp_path)
    told = ("--data", "slide.tif", "-a", "pooled=True")
    refused = infer(folder, *told, "-o", "classes.tif")
    assert refused.returncode == 1 and "written as .csv, not classes.tif" in refused.stderr
    shown = infer(folder, *told, "--classes", "glass,tumour,stroma")
    assert shown.returncode == 0 and "probability 0." in shown.stdout and "(stroma)" in shown.stdout


@pytest.mark.parametrize("name", ["[a].tif", "[/x].tif", "[bold]b.tif", "a b\u00e9\u4e2d.tif"])
def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path, name: str) -> None:
    folder = write_work(tmp_path)
    name = name.replace("/", "") if "/" in name else name
    where = folder / "[/x]"
    where.mkdir(parents=True)
    write_slide(where / name, Scene(size=(100, 100), tile=64))
    shown = infer(folder, "--data", f"[/x]/{name}")
    assert shown.returncode == 0, shown.stderr
    assert f"[/x]/{name}" in shown.stderr and (where / name).with_suffix(".mask.tif").exists()
    shown = infer(folder, "--data", "[/x]", "-o", "[b]", "-a", "pooled=True")
    assert shown.returncode == 0, shown.stderr
    assert name in shown.stderr and (folder / "[b]" / "results.csv").is_file()


def test_the_names_of_classes_are_saved_with_the_run(tmp_path: Path) -> None:
    job = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def batch(size):
    return torch.rand(size, 3, 32, 32), torch.randint(2, (size,))
"""
    (tmp_path / "job.py").write_text(job)
    table = write_slides(tmp_path / "slides", 4, size=(64, 64), tile=16, name="train.csv")
    text = table.read_text().replace(",0\n", ",benign\n").replace(",1\n", ",malignant\n")
    table.write_text(text)
    trained = outcore_command(
        "train", "job.py", "--data", "slides/train.csv", "--out", "runs/a", "--device", "cpu", folder=tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    shown = outcore_command(
        "infer", "job.py", "-w", "runs/a", "--data", "slides/train.csv", "-o", "out", folder=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    first = (tmp_path / "out/results.csv").read_text().splitlines()
    assert first[0].startswith("path,label,class,name,score_benign,score_malignant,probability_benign")
    assert first[1].split(",")[3] in ("benign", "malignant")


def test_more_classes_than_colours_are_told_apart_by_darker_rounds() -> None:
    colours = class_colours(24).astype(int)
    assert len({tuple(colour) for colour in colours.tolist()}) == 24
    first = next(i for i in range(1, 24) if np.abs(colours[i] - 0.75 * colours[0]).max() <= 0.5)
    for i in range(first, 24):
        assert np.abs(colours[i] - 0.75 * colours[i - first]).max() <= 1


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_every_plane_of_a_map_is_written_at_every_level(tmp_path: Path, planes: int) -> None:
    pixels = np.random.default_rng(0).random((planes, 1100, 700), np.float32)
    write_pyramid(tmp_path / "map.tif", pixels, scratch=tmp_path, mean=False)
    with tifffile.TiffFile(tmp_path / "map.tif") as file:
        levels = file.series[0].levels
        assert len(levels) > 1
        for k, level in enumerate(levels):
            assert np.array_equal(level.asarray().reshape(planes, *level.shape[-2:]), pixels[:, :: 2**k, :: 2**k])
