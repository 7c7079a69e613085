"""Every command on a job whose model is a Keras model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import outcore
from outcore.data import Batch, Scene, open_slide, write_slide
from tests.cli.command import outcore_command

JOB = """
import keras
import torch

L = keras.layers
keras.config.set_floatx("float32")
size = 2


def model():
    keras.utils.set_random_seed(0)
    given = keras.Input((32, 32, 3))
    first = L.BatchNormalization()(L.Conv2D(6, 3, padding="same", activation="relu", name="first")(given))
    x = L.Conv2DTranspose(4, 2, strides=2)(L.MaxPooling2D()(first))
    return keras.Model(given, L.Conv2D(2, 1, name="last")(L.Concatenate()([x, first])), name="small")


def batch(size):
    return torch.randn(size, 32, 32, 3), torch.randint(2, (size, 32, 32))


def loss(output, target):
    return torch.nn.functional.cross_entropy(output.permute(0, 3, 1, 2), target)


def optimizer(params, lr=0.01):
    return torch.optim.SGD(params, lr=lr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_a_slide_goes_in_with_channels_last_and_a_map_comes_out(folder: Path) -> None:
    write_slide(folder / "slide.tif", Scene(size=(150, 190), share=0.3, tile=64))
    words = ("--untrained", "--data", "slide.tif", "--scores", "-o", "scores.npy", "--memory", "2MiB")
    shown = outcore_command("infer", "job.py", *words, folder=folder)
    assert shown.returncode == 0, shown.stderr
    twin = outcore.Job.load(str(folder / "job.py")).build().eval()
    with torch.no_grad():
        want = twin(Batch((open_slide(folder / "slide.tif"),)).tensor().movedim(1, -1))
    have = np.load(folder / "scores.npy")
    assert have.shape[-2:] == want.shape[1:3]
    assert np.abs(have.reshape(want.movedim(-1, 1).shape) - want.movedim(-1, 1).numpy()).max() < 1e-5


COMMANDS = [
    ("graph job.py", "first"),
    ("profile job.py", "first"),
    ("plan job.py --memory 80% -o plan.json", "peak"),
    ("simulate job.py plan.json", "step"),
    ("verify job.py plan.json", ""),
    ("train job.py --epochs 1 --steps 2 --device cpu --out run", ""),
    ("train job.py --epochs 2 --steps 2 --device cpu --out run", ""),
    ("report run -o run.html", ""),
    ("train job.py --epochs 1 --steps 2 --ranks 2 --device cpu --out ranks", ""),
    ("whatif job.py --on a100", "a100"),
    ("explore job.py --export page.html --seconds 0", ""),
    ("sweep job.py --set lr=0.1,0.01 --steps 2 --no-measure --device cpu", "0.01"),
]


@pytest.mark.slow
def test_every_command_takes_a_keras_job(folder: Path) -> None:
    for line, word in COMMANDS:
        shown = outcore_command(*line.split(), folder=folder)
        print(f"$ outcore {line}\n{shown.stdout}\n{shown.stderr}")
        assert shown.returncode == 0, (line, shown.stdout, shown.stderr)
        assert word in shown.stdout.lower() + shown.stderr.lower(), (line, shown.stdout)
        assert "Traceback" not in shown.stderr
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "run.html", "page.html", "run", "ranks", "sweep"} <= names
