"""Run the snippets of docs/how-to/keras.md of one backend, in order, with a small network; prints what each did.

KERAS_BACKEND=torch python -m tests.keras.snippets FOLDER
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outcore
from tests.cli.command import outcore_command

PAGE = Path(__file__).parents[2] / "docs/how-to/keras.md"
SIDE = 32
"""Of images, where the page has 224."""
NETWORK = "ResNet50(weights=None, classes=10)"
SMALL = f"MobileNet(weights=None, classes=10, input_shape=({SIDE}, {SIDE}, 3), alpha=0.25)"
"""In the place of the page's network."""


def snippets() -> list[tuple[str, str]]:
    """The Python on the page, each piece under its heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    found = []
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            assert NETWORK in code or "keras.applications" not in code
            found.append((heading, code.replace("224", str(SIDE)).replace(NETWORK, SMALL)))
    return found


def names(folder: Path) -> dict[str, Any]:
    """What the page takes for granted: a data set, and batches."""
    import keras

    random = np.random.default_rng(0)
    x, y = random.random((16, SIDE, SIDE, 3), "float32"), random.integers(10, size=16)
    batches = [(torch.from_numpy(x[:8]), torch.from_numpy(y[:8]))] * 2

    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    return {"__name__": "snippet", "dataset": Data(), "batches": batches, "keras": keras, "outcore": outcore}


def run(folder: Path, backend: str) -> None:
    """All that this backend can run."""
    known = names(folder)
    keras = known["keras"]
    for heading, code in snippets():
        if "on TensorFlow" in heading and backend != "tensorflow":
            continue
        if "on the torch backend" in heading:
            if backend != "torch":
                continue
            known["model"] = eval(f"keras.applications.{SMALL}", {"keras": keras})
        if "command" in heading:
            commands(folder, code)
            print(f"ran: {heading}", flush=True)
            continue
        exec(compile(code, heading, "exec"), known)
        if "too large" in heading:
            assert np.isfinite(np.asarray(known["model"](np.zeros((1, SIDE, SIDE, 3), "float32")))).all()
        print(f"ran: {heading}", flush=True)


def commands(folder: Path, code: str) -> None:
    """The job of the page, under the commands of the page."""
    (folder / "job.py").write_text(code)
    for line in re.findall(r"^outcore (.*)$", PAGE.read_text(), re.MULTILINE):
        more = ["--steps", "2", "--epochs", "1", "--device", "cpu"] if line.startswith("train") else []
        shown = outcore_command(*line.split(), *more, folder=folder)
        assert shown.returncode == 0, (line, shown.stdout, shown.stderr)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    os.chdir(where)
    run(where, os.environ.get("KERAS_BACKEND", "tensorflow"))
