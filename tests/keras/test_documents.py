"""Keras as a user meets it: the how-to's snippets, the examples, and a run that was killed and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outcore.run import read_weights
from outcore.train.run_folder.folder import RunFolder

ROOT = Path(__file__).parents[2]

JOB = """
import os
import signal
from pathlib import Path

import keras
import torch

L = keras.layers
size = 4
STEPS = 0


def model():
    given = keras.Input((8, 8, 3))
    x = L.BatchNormalization()(L.Conv2D(6, 3, padding="same", activation="relu", name="first")(given))
    return keras.Model(given, L.Dense(3, name="last")(L.GlobalAveragePooling2D()(L.Dropout(0.3)(x))), name="small")


def batch(size):
    return torch.randn(size, 8, 8, 3), torch.randint(3, (size,))


def dataset(split):
    random = torch.Generator().manual_seed(len(split))
    return [(torch.randn(8, 8, 3, generator=random), number % 3) for number in range(24)]


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def loss(output, target):
    global STEPS
    if torch.is_grad_enabled():
        STEPS += 1
        if STEPS > 14 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.cross_entropy(output, target)
"""


def python(*words: str, folder: Path, backend: str = "tensorflow") -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with Keras on a backend."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_the_snippets_of_the_page_run(backend: str, tmp_path: Path) -> None:
    shown = python("-m", "tests.keras.snippets", str(tmp_path), folder=tmp_path, backend=backend)
    print(shown.stdout, shown.stderr[-3000:])
    assert shown.returncode == 0
    assert shown.stdout.count("ran: ") == (4 if backend == "tensorflow" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("program", ["fit.py", "train.py"])
def test_the_examples_run(program: str, backend: str, tmp_path: Path) -> None:
    for path in (ROOT / "examples/keras").glob("*.py"):
        shutil.copy(path, tmp_path)
    shown = python(program, "--steps", "3", "--memory", "80%", folder=tmp_path, backend=backend)
    print(shown.stdout, shown.stderr[-3000:])
    assert shown.returncode == 0 and "wrote unet.keras" in shown.stdout
    load = "import keras; model = keras.models.load_model('unet.keras'); print(model.count_params())"
    assert python("-c", load, folder=tmp_path, backend=backend).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--ranks", "2")], ids=["one", "ranks"])
def test_a_killed_run_of_a_keras_job_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    train = ["-m", "outcore", "train", "job.py", "--epochs", "3", "--device", "cpu", *words]
    whole = python(*train, "--out", "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "kill").touch()
    killed = python(*train, "--out", "parts", folder=tmp_path)
    assert killed.returncode != 0 and not (tmp_path / "kill").exists()
    again = python(*train, "--out", "parts", folder=tmp_path)
    print(killed.stderr[-1000:], again.stdout[-1000:], again.stderr[-1000:])
    assert again.returncode == 0
    want, have = (read_weights(RunFolder(tmp_path / name).last) for name in ("whole", "parts"))
    assert want.keys() == have.keys() and all(torch.equal(want[name], have[name]) for name in want)
