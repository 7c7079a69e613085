"""One slide for each rank: the gradients of all of them, whatever their sizes, also within a budget and in tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.data import write_slides
from outcore.run import read_weights
from tests.cli.command import outcore_command

JOB = """
import torch
from outcore.models import SlideNet

def model():
    return SlideNet()

def batch(size):
    return torch.rand(size, 3, 128, 128), torch.randint(2, (size,))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""


TILES = ["--memory", "900KiB"]


def prepared(folder: Path, *sizes: tuple[int, int]) -> list[str]:
    (folder / "job.py").write_text(JOB)
    rows = []
    for i, size in enumerate(sizes):
        write_slides(folder / "slides", 2, size=size, tile=64, seed=i, name=f"s{i}.csv")
        rows += (folder / "slides" / f"s{i}.csv").read_text().splitlines()[1:]
    (folder / "slides" / "all.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return ["train", "job.py", "--data", "slides/all.csv", "--validation", "slides/all.csv", "--epochs", "2"]


def weights(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return read_weights(folder / run / "checkpoints" / "last")


@pytest.mark.parametrize(
    "budget",
    [pytest.param([], id="plain", marks=pytest.mark.slow), pytest.param(TILES, id="in tiles")],
)
def test_slides_of_different_sizes_train_as_on_one_rank(tmp_path: Path, budget: list[str]) -> None:
    command = prepared(tmp_path, (192, 128), (128, 192))
    two = outcore_command(*command, *budget, "--ranks", "2", "--out", "two", folder=tmp_path)
    assert two.returncode == 0, two.stderr
    one = outcore_command(*command, "--accumulate", "2", "--batch", "1", "--out", "one", folder=tmp_path)
    assert one.returncode == 0, one.stderr
    expected = weights(tmp_path, "one")
    for name, found in weights(tmp_path, "two").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # one rank goes on in tiles, and several ranks without, in quick tests
@pytest.mark.parametrize("budget", [pytest.param([], id="plain"), pytest.param(TILES, id="in tiles")])
def test_two_ranks_go_on(tmp_path: Path, budget: list[str]) -> None:
    command = prepared(tmp_path, (192, 128), (128, 192))
    two = outcore_command(*command, *budget, "--ranks", "2", "--out", "two", folder=tmp_path)
    assert two.returncode == 0, two.stderr
    more = outcore_command(*command[:-1], "3", *budget, "--ranks", "2", "--out", "two", folder=tmp_path)
    assert more.returncode == 0, more.stderr
