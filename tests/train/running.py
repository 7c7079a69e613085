"""Small runs in this process: a job file, a folder, and what came of it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outcore.data import write_slides
from outcore.run.checkpoint.restore import read_weights
from outcore.train.application import train
from outcore.train.run_folder.folder import RunFolder
from outcore.train.settings.config import Config

JOB = """
import os, signal
import torch
from torch import nn
from torch.nn import functional as F

size = 4
CALLS = 0
STOP_AT = {stop_at}


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3))


def batch(size):
    return torch.randn(size, 6), torch.randint(3, (size,))


def dataset(split):
    random = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(24 if split == "train" else 9, 6, generator=random)
    return [(x, int(x.sum() > 0) + int(x[0] > 0.5)) for x in inputs]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss(output, target):
    global CALLS
    if torch.is_grad_enabled():
        if CALLS in STOP_AT:
            {how}
        CALLS += 1
    return F.cross_entropy(output, target)
"""
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
BREAK = 'raise RuntimeError("the power went out")'


def write_job(folder: Path, *, stop_at: tuple[int, ...] = (), how: str = TERMINATE, name: str = "job.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(JOB.format(stop_at=list(stop_at), how=how))
    return path


def run(job: Path, out: Path, *words: str, **sections: Any) -> tuple[int, str]:
    """Train; the exit code and what was said."""
    said = io.StringIO()
    config = Config.read({"job": str(job), "out": str(out), "train": {"device": "cpu"}, **sections}, words)
    code = train(config, Console(file=said, width=200))
    return code, said.getvalue()


def weights(out: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return read_weights(getattr(RunFolder(out), which))


def table(path: Path, *without: str) -> list[dict[str, str]]:
    """Rows of a log, without what depends on the clock."""
    clock = ("time_s", "examples_per_s", *without)
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in clock} for row in csv.DictReader(file)]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


SLIDES = """
import torch
from outcore.models import SlideNet

def model():
    return SlideNet(width=2)

def batch(size):
    return torch.rand(size, 3, 64, 64), torch.randint(2, (size,))
"""


def slide_job(folder: Path, **options: Any) -> tuple[Path, Path]:
    (folder / "slides.py").write_text(SLIDES)
    return folder / "slides.py", write_slides(folder / "data", 4, size=(64, 80), tile=32, **options)
