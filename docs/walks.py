"""Prints the walk of three calls through the project: which files and packages each visits, in order of first visit.

    python docs/walks.py [within|train|engine]

A file is visited when a function of it is entered (module bodies, which only define things, do not count); a switch is
a step from a file of one package to a file of another in that order. Tests of `docs/design/architecture.md` hold the
figures there against what this prints.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import outcore

ROOT = Path(outcore.__file__).parent
JOB = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

def batch(size):
    return torch.randn(size, 3, 64, 64), torch.randint(2, (size,))

loss = nn.functional.cross_entropy

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""


def within() -> Callable[[], Any]:
    """`outcore.within` and one step under it."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    x = torch.randn(4096, 64)

    def walk() -> None:
        outcore.within(net, (x,), memory="85%", quiet=True)
        net(x).sum().backward()

    return walk


def train() -> Callable[[], Any]:
    """`outcore train` on a slide that does not fit its budget."""
    from outcore.cli.main import main
    from outcore.data import write_slides

    folder = Path(tempfile.mkdtemp())
    (folder / "job.py").write_text(JOB)
    table = write_slides(folder / "slides", 2, size=(2048, 2048))
    words = ["train", "job.py", "--data", str(table), "--memory", "24MiB", "--epochs", "1", "--device", "cpu"]

    names = itertools.count()

    def walk() -> None:
        os.chdir(folder)
        sys.argv = ["outcore", *words, "--out", f"run{next(names)}"]
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise

    return walk


def engine() -> Callable[[], Any]:
    """`Engine.step` on one rank."""
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    made = outcore.Engine(net, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, example=batch[:1])

    return lambda: made.step(*batch)


WALKS = {"within": within, "train": train, "engine": engine}


def visited(call: Callable[[], Any]) -> list[str]:
    """The files of the project whose functions a call enters the second time, by first visit."""
    found: dict[str, None] = {}
    known: set[CodeType] = set()
    prefix = str(ROOT) + os.sep

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            known.add(code)
            if code.co_filename.startswith(prefix) and code.co_name != "<module>":
                found.setdefault(code.co_filename.removeprefix(prefix))

    call()  # so that modules that are imported on the way are there
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


def package(path: str) -> str:
    """The package of a file: its first folder, or the file itself."""
    return Path(path).parts[0]


def figures(files: list[str]) -> tuple[int, int, int]:
    """Files, packages, and switches from package to package."""
    packages = [package(path) for path in files]
    return len(files), len(set(packages)), sum(a != b for a, b in itertools.pairwise(packages))


def main(names: list[str]) -> None:
    """Print the walks that were asked for, or all."""
    for name in names or WALKS:
        files = visited(WALKS[name]())
        count, packages, switches = figures(files)
        print(f"{name}: {count} files, {packages} packages, {switches} switches")
        for path in files:
            print(f"    {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
