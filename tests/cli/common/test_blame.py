"""Errors of a job's own code name the block and the line; a torchvision that does not fit, what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.cli.common.blame import block_of, hints
from outcore.cli.main import main
from tests.cli.command import outcore_command

JOB = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(100, 2))

    def forward(self, x):
        return self.body(x)

def model():
    return Net()

def batch(size):
    return torch.rand(size, 3, 16, 16), torch.randint(2, (size,))
"""


@pytest.mark.parametrize("command", [["graph"], ["profile", "--on", "t4"]])
def test_a_shape_error_names_the_block_and_the_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    shown = outcore_command(command[0], "job.py", *command[1:], folder=tmp_path)
    assert shown.returncode == 1
    assert "job.py:11" in shown.stderr and "body.2 (Linear)" in shown.stderr


def test_a_torchvision_for_another_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    shown = outcore_command("graph", "job.py", folder=tmp_path)
    minor = int(torch.__version__.split(".")[1])
    assert f"'torchvision==0.{minor + 15}.*'" in " ".join(shown.stderr.split())


def test_what_is_no_model_has_no_block() -> None:
    assert block_of(ValueError("x")) == "" and hints(ValueError("x")) == [] and callable(main)
