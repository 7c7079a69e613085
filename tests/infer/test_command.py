"""Whole slides through a trained network, written as maps and rows, equal to untiled inference."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outcore.cli.infer import classes_text
from outcore.data import Batch, Scene, open_slide, write_slide
from outcore.errors import DataError, StreamError
from outcore.infer.map_file import check_kind
from outcore.stream import stream
from tests.cli.command import outcore_command

JOB = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, pooled=False):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1))
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.pooled = pooled

    def forward(self, x):
        x = self.up(self.down(x).relu())
        return x.mean((2, 3)) if self.pooled else x

def model(pooled=False):
    torch.manual_seed(3)
    return Net(pooled)

def batch(size):
    return torch.randn(size, 3, 64, 64), None
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    write_slide(tmp_path / "slide.tif", Scene(size=(560, 730), share=0.3, tile=128))
    from outcore.job import Job

    net = Job.load(str(tmp_path / "job.py")).build().eval()
    net.down[1].running_mean.normal_(0, 0.1)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    pixels = Batch((open_slide(tmp_path / "slide.tif"),)).tensor()
    with torch.no_grad():
        return tmp_path, net(pixels)


@pytest.mark.parametrize("name", ["mask.tif", "mask.npy", "mask.zarr"])
def test_a_map_is_that_of_the_untiled_network(work, name) -> None:
    folder, expected = work
    shown = outcore_command(
        *(
            "infer",
            "job.py",
            "--weights",
            "w.safetensors",
            "--data",
            "slide.tif",
            "-o",
            name,
            "--memory",
            "3MiB",
            "--json",
        ),
        folder=folder,
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["classes"] is True
    got = open_slide(folder / name).region((0, 0), (560, 730))[0] if name.endswith(".tif") else _read(folder / name)
    agree = (np.asarray(got) == expected[0].argmax(0).numpy()).mean()
    assert agree > 0.9999  # a pixel may be torn between two classes by the order of a sum
    assert not list(folder.glob(".*partial*"))


def _read(path):
    if path.suffix == ".npy":
        return np.load(path)
    import zarr

    return zarr.open_array(str(path), mode="r")[:]


def test_scores_and_a_row_of_classes(work) -> None:
    folder, expected = work
    common = ("--weights", "w.safetensors", "--data", "slide.tif", "--memory", "3MiB")
    shown = outcore_command("infer", "job.py", *common, "--scores", "-o", "scores.npy", folder=folder)
    assert shown.returncode == 0 and "scores.npy" in shown.stdout, shown.stderr
    np.testing.assert_allclose(np.load(folder / "scores.npy"), expected[0].numpy(), atol=1e-4)
    shown = outcore_command("infer", "job.py", *common, "-a", "pooled=True", "-o", "row.csv", "--json", folder=folder)
    assert shown.returncode == 0, shown.stderr
    np.testing.assert_allclose(json.loads(shown.stdout)["scores"], expected.mean((2, 3))[0].numpy(), atol=1e-4)
    assert (folder / "row.csv").read_text().startswith("path,label,class,name,score_0,score_1")


def test_the_class_is_said_with_the_likeliest_by_name() -> None:
    row = {"class": 1, "name": "tumour", "names": ["normal", "tumour"], "scores": [-1.0, 1.25]}
    said = classes_text(row | {"probabilities": [0.095349, 0.904651]})
    assert said == "class 1 (tumour): probability 0.9047 of tumour, 0.09535 of normal; scores 1.25, -1"
    many = {"class": 9, "name": "9", "names": [str(i) for i in range(10)]}
    said = classes_text(many | {"scores": list(range(10)), "probabilities": [i / 45 for i in range(10)]})
    assert said.startswith("class 9: probability 0.2 of 9, 0.1778 of 8,") and "the first 5 of 10 classes" in said
    one = {"class": 0, "names": ["0"], "scores": [-2.0], "probabilities": [0.119203]}
    assert classes_text(one) == "class 0: score -2, as a logit probability 0.1192"


def test_what_does_not_fit_is_refused(work) -> None:
    folder, _ = work
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    shown = outcore_command("infer", "job.py", "--weights", "other.safetensors", "--data", "slide.tif", folder=folder)
    assert shown.returncode == 1 and "does not fit the model" in shown.stderr
    shown = outcore_command("infer", "job.py", "--untrained", "--data", "slide.tif", "--memory", "10KiB", folder=folder)
    assert shown.returncode == 1 and "allow more memory" in shown.stderr
    told = ("infer", "job.py", "--untrained", "--data", "slide.tif", "--memory", "160KiB")
    shown = outcore_command(*told, folder=folder)
    assert shown.returncode == 1 and "give at least " in shown.stderr
    shown = outcore_command("infer", "job.py", "--data", "nothing.tif", folder=folder)
    assert shown.returncode == 1 and "no file nothing.tif" in shown.stderr
    with pytest.raises(DataError, match=r"\.tif, \.zarr or \.npy"):
        check_kind(folder / "mask.png", (4, 4))


def test_tiles_of_a_map_come_one_by_one_and_fill_it() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3, padding=1), torch.nn.ReLU())
    x = torch.randn(1, 3, 30, 40)
    whole = torch.full((1, 2, 30, 40), float("nan"))
    for region, part in stream(net, tile=16).tiles(x):
        whole[tuple(slice(*i) for i in region)] = part
    torch.testing.assert_close(whole, net(x).detach())
    with pytest.raises(StreamError, match="a map"):
        next(iter(stream(torch.nn.Sequential(net, torch.nn.AdaptiveAvgPool2d(1)), tile=16).tiles(x)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--classes", "a,b"), "--classes names 2 classes (a, b); the network gives 4: name as many"),
        (("--key", "out"), "error: --key out: the model returns one Tensor; leave out --key"),
        (("-o", "mask.jpg"), "not as .jpg"),
        (("-a", "pooled=true", "--heat", "1"), "this network gives classes; leave it out"),
        (("--data", "gone.tif"), "error: no file gone.tif; give the path of a slide"),
    ],
)
def test_words_that_would_have_no_effect_are_refused(work, words, said) -> None:
    folder, _ = work
    shown = outcore_command("infer", "job.py", "--untrained", "--data", "slide.tif", *words, folder=folder)
    assert shown.returncode == 1 and said in shown.stderr, shown.stderr
