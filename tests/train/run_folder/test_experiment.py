"""A run goes on only as the experiment it was: another network, loss, class list or data is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import outcore
from outcore.errors import TrainError
from outcore.train.examples.supply import ExampleSupply
from outcore.train.run_folder.experiment import changes, describe
from tests.train.running import run, write_job

WORDS = ("train.epochs=1", "train.batch=4")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nn.ReLU()", "nn.GELU()", "another network"),
        ("nn.Dropout(0.3)", "nn.Dropout(0.1)", "other options of its layers"),
        (", nn.ReLU()", "", "another network|another model"),
        ("return F.cross_entropy(output, target)", "return F.cross_entropy(output, target) * 2", "another loss"),
        ("24 if split", "23 if split", "train examples: 24 before, 23 now"),
    ],
)
def test_a_changed_job_is_refused_or_gone_on_with_when_told_to(tmp_path: Path, old: str, new: str, said: str) -> None:
    job = write_job(tmp_path, stop_at=(3,))
    run(job, tmp_path / "run", *WORDS)
    text = write_job(tmp_path).read_text()
    assert old in text
    job.write_text(text.replace(old, new))
    with pytest.raises((TrainError, OSError), match=said):
        run(job, tmp_path / "run", *WORDS)
    if "model" not in said:
        code, shown = run(job, tmp_path / "run", *WORDS, "checkpoint.allow_changes=true")
        assert code == 0 and said in shown and "going on as told" in shown


def test_the_same_job_with_another_comment_goes_on(tmp_path: Path) -> None:
    job = write_job(tmp_path, stop_at=(3,))
    run(job, tmp_path / "run", *WORDS)
    job.write_text(write_job(tmp_path).read_text() + "\n# a thought\n")
    assert run(job, tmp_path / "run", *WORDS)[0] == 0


class Named(nn.Module):
    """Returns a dictionary, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.head(x), "beside": (x.mean(), x > 0)}


def test_the_loss_of_any_output_is_known_again() -> None:
    graph, targets = outcore.capture(Named(), (torch.ones(2, 4),)), torch.tensor([0, 2])

    def fingerprint(loss: Callable[[Any, Any], torch.Tensor]) -> dict[str, Any]:
        return describe(graph, None, loss, targets, ExampleSupply([], [], 0, 2))

    def named(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        mean, positive = output["beside"]
        return F.cross_entropy(output["logits"], target) + mean * positive.float().mean()

    def of_a_tensor(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output["logits"] if isinstance(output, dict) else pytest.fail("a tensor"), target)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = fingerprint(named)
        assert fingerprint(of_a_tensor)["loss"] is not None
    assert changes(known, fingerprint(named)) == []
    (said,) = changes(known, fingerprint(lambda output, target: 2 * named(output, target)))
    assert said.startswith("another loss")
    assert fingerprint(lambda output, target: output["nothing"])["loss"] is None


FOLDER = """
import os, signal
import torch
from torch import nn
from torch.nn import functional as F

CALLS = 0

def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

def batch(size):
    return torch.rand(size, 3, 16, 16), torch.randint(2, (size,))

def loss(output, target):
    global CALLS
    CALLS += torch.is_grad_enabled()
    if CALLS == {stop}:
        os.kill(os.getpid(), signal.SIGTERM)
    return F.cross_entropy(output, target)
"""


def images(folder: Path) -> None:
    for number in range(6):
        path = folder / ("tumour" if number % 2 else "normal") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((torch.rand(16, 16, 3) * 255).byte().numpy()).save(path)


def added(folder: Path) -> None:
    (folder / "normal" / "extra.png").write_bytes((folder / "normal" / "0.png").read_bytes())


def removed(folder: Path) -> None:
    (folder / "normal" / "0.png").unlink()


def changed(folder: Path) -> None:
    Image.new("RGB", (16, 16)).save(folder / "normal" / "0.png")


def renamed_class(folder: Path) -> None:
    (folder / "tumour").rename(folder / "carcinoma")


def swapped(folder: Path) -> None:
    (folder / "tumour" / "1.png").rename(folder / "normal" / "1.png")
    (folder / "normal" / "0.png").rename(folder / "tumour" / "0.png")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (added, "train files: 6 before, 7 now"),
        (removed, "train files: 6 before, 5 now"),
        (changed, "train contents differ"),
        (renamed_class, "other classes .normal, tumour before, carcinoma, normal now"),
        (swapped, "train names differ"),
    ],
)
def test_changed_data_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    job = tmp_path / "job.py"
    images(tmp_path / "data")
    words = (f"data.train={tmp_path / 'data'}", "train.epochs=1", "train.batch=2")
    job.write_text(FOLDER.replace("{stop}", "2"))
    assert run(job, tmp_path / "run", *words)[0] == 143
    change(tmp_path / "data")
    job.write_text(FOLDER.replace("{stop}", "-1"))
    with pytest.raises(TrainError, match=said):
        run(job, tmp_path / "run", *words)


def test_data_at_another_place_with_its_times_kept_goes_on(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    images(tmp_path / "data")
    words = ("train.epochs=1", "train.batch=2", f"data.train={tmp_path / 'data'}")
    job.write_text(FOLDER.replace("{stop}", "2"))
    assert run(job, tmp_path / "run", *words)[0] == 143
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "data").symlink_to(tmp_path / "moved")
    job.write_text(FOLDER.replace("{stop}", "-1"))
    assert run(job, tmp_path / "run", *words)[0] == 0
