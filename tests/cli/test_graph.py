"""The command as typed: output, files, messages, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import outcore
from outcore.machine import format_bytes
from outcore.models import UNet
from tests.cli.command import outcore_command

UNET = ["outcore.models:UNet", "--input", "1x3x64x64", "--arg", "width=4", "--arg", "depth=2"]


TWICE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.a(x).mean(0) + self.a(y).mean(0)

model = Net

def batch(size):
    return (torch.rand(size, 8), torch.rand(size, 8)), torch.rand(8)
"""


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "outcore", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == f"outcore {outcore.__version__}"


def test_a_tree_with_shapes_and_parameters() -> None:
    shown = outcore_command("graph", *UNET, "--depth", "1")
    assert shown.returncode == 0, shown.stderr
    assert "encoder1" in shown.stdout
    assert "1×4×64×64" in shown.stdout


def test_lists_json_and_pictures(tmp_path: Path) -> None:
    lists = outcore_command("graph", *UNET, "--depth", "1", "--adjacency", "--direction", "inputs")
    assert "decoder1 ← encoder1, decoder2" in " ".join(lists.stdout.split())
    written = outcore_command("graph", *UNET, "--svg", "a.svg", "--html", "a.html", "--json", folder=tmp_path)
    assert outcore.Graph.from_json(json.loads(written.stdout)).root.type == "UNet"
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "encoder1" in (tmp_path / "a.html").read_text()


def test_skips_and_cuts_are_tables_of_what_crosses() -> None:
    graph = outcore.capture(UNet(width=4, depth=2), [(1, 3, 64, 64)])
    skips = outcore_command("graph", *UNET, "--depth", "1", "--skips").stdout.splitlines()
    assert [row.split()[:4] for row in skips[1:]] == [
        [skip.value, skip.source, skip.target, str(skip.distance)] for skip in graph.skips(1)
    ]
    cuts = outcore_command("graph", *UNET, "--depth", "1", "--cuts").stdout.splitlines()
    assert [row.split() for row in cuts[1:]] == [
        [cut.after, cut.before, str(len(cut.values)), *format_bytes(cut.bytes).split()] for cut in graph.cuts(1)
    ]
    chain = outcore_command(
        "graph", "torch.nn:Linear", "-i", "1x4", "-a", "in_features=4", "-a", "out_features=4", "--skips"
    )
    assert "no value is used further away than the next block" in chain.stdout


def test_two_calls_of_a_function_are_two_and_of_a_module_one(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TWICE)
    shown = outcore_command("graph", "job.py", "--adjacency", "--functions", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines == ["a → mean()#0, mean()#1", "mean()#0 → add()", "mean()#1 → add()", "add() → ·"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["graph", "missing.py"], 1, "no file missing.py"),
        (["graph", *UNET, "--expand", "encodr"], 1, "did you mean"),
        (["graph", *UNET, "--svg", "no/such/folder/a.svg"], 1, "mkdir -p no/such/folder"),
        (["graph", *UNET, "--depth", "0"], 2, "depth"),
        (["graph", *UNET, "--direction", "up"], 2, "outputs or inputs"),
        (["grph"], 2, "did you mean graph?"),
    ],
)
def test_wrong_use_says_why(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    shown = outcore_command(*arguments, folder=tmp_path)
    assert shown.returncode == code
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_help_teaches() -> None:
    shown = outcore_command("graph", "--help")
    assert "100000x100000" in shown.stdout
    assert "--adjacency" in shown.stdout
