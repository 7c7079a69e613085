"""Commands that take more than a moment say on a terminal what they do meanwhile."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SPINNING = set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏━")
"""Frames of a spinner, and the bar of a progress."""
JOB = """
import torch
from torch import nn

size = 4

def model():
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())), nn.Flatten(),
                         nn.Linear(8 * 32 * 32, 2))

def batch(size):
    return torch.randn(size, 8, 32, 32), torch.randint(2, (size,))

def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)
"""


def shown(folder: Path, *arguments: str) -> str:
    """What a command prints on a terminal of 100 columns."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outcore", *arguments]
    running = subprocess.Popen(command, cwd=folder, env=environment, stdin=side, stdout=side, stderr=side)
    os.close(side)
    seen = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(main)
    text = seen.decode(errors="replace")
    assert running.wait() == 0, text
    return text


@pytest.mark.parametrize(
    "command",
    [
        "graph job.py --html net.html",
        "profile job.py --measure --batch 1,2,4",
        "plan job.py --machine h200 --memory 1GiB",
        "plan job.py --machine v100x4",
        "verify job.py --memory 80%",
        "whatif job.py --on a100,h100",
        "sweep job.py --set lr=0.1,0.2 --steps 200",
        "train job.py --epochs 1 train.steps=50",
    ],
)
def test_something_moves_while_a_command_works(command: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    assert SPINNING & set(shown(tmp_path, *command.split()))
