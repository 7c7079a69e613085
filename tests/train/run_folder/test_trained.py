"""What a run learned, used afterwards: the weights come with the model's arguments and the preparation of images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from outcore.data import open_slide, write_slides
from outcore.errors import CheckpointError
from outcore.run.checkpoint.restore import read_weights
from outcore.train.run_folder.trained import TrainedNetwork, read_image
from outcore.train.settings.config import DataConfig
from tests.cli.command import outcore_command

JOB = """
import torch
from torch import nn

def model(width=2):
    local = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*local, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))

def batch(size):
    return torch.rand(size, 3, 32, 32), torch.randint(2, (size,))
"""


def test_a_run_is_used_as_it_was_trained(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    write_slides(tmp_path / "slides", 2, size=(64, 64), tile=16, name="train.csv")
    settings = (
        "--arg",
        "width=4",
        "--device",
        "cpu",
        "data.microns_per_pixel=0.5",
        "data.mean=[0.8, 0.7, 0.6]",
        "data.std=[2, 3, 4]",
    )
    told = ("train", "job.py", "--data", "slides/train.csv", "--out", "runs/first", *settings)
    trained = outcore_command(*told, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr

    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    net.load_state_dict(read_weights(tmp_path / "runs/first/checkpoints/last"))
    slide = tmp_path / "slides/train-000.tif"
    pixels = open_slide(slide).at(microns_per_pixel=0.5).read([(0, 3), (0, 32), (0, 32)])[None] / 255
    mean, std = torch.tensor([0.8, 0.7, 0.6]).view(3, 1, 1), torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1)
    expected = net((pixels - mean) / std)[0].tolist()
    for more, weights in (((), "runs/first"), (("--arg", "width=4"), "runs/first/checkpoints/last")):
        shown = outcore_command(
            "infer", "job.py", "-w", weights, "--data", str(slide), "--json", *more, folder=tmp_path
        )
        assert shown.returncode == 0, shown.stderr
        found = json.loads(shown.stdout)["scores"]
        assert (found == pytest.approx(expected, abs=1e-5)) is (weights == "runs/first")


def test_an_image_is_brought_to_the_size_of_training(tmp_path: Path) -> None:
    write_slides(tmp_path, 1, size=(64, 48), tile=16, form="npy")
    image = read_image(open_slide(tmp_path / "slides-000.npy"), DataConfig(resize=32))
    assert image.shape == (1, 3, 32, 32) and image.tensor().max() <= 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing.safetensors", r"no weights in .*nothing.safetensors; give a .safetensors file"),
        ("text.safetensors", r"no weights in .*text.safetensors \(.*\); give"),
        (".", r"no good checkpoint in"),
        ("other.safetensors", r"2 names are missing, 1 are unknown \(bias, weight\)"),
        ("wide.safetensors", r"weight has shape \[2, 5\], the model's has \[2, 3\]"),
    ],
)
def test_what_holds_no_weights_of_the_model_is_refused(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "text.safetensors").write_text("not a tensor in it")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    save_file(nn.Linear(5, 2).state_dict(), tmp_path / "wide.safetensors")
    with pytest.raises(CheckpointError, match=said):
        TrainedNetwork.read(tmp_path / given).load_into(nn.Linear(3, 2))
