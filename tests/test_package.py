"""The package as a dependency: light to import, nothing optional, version in one place."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import outcore

EXTRAS = "torchvision monai timm transformers sklearn plotly starlette pygls optuna openslide tifffile zarr triton"


def test_importing_brings_in_no_extra() -> None:
    program = (
        "import sys, torch\nbefore = set(sys.modules)\nimport outcore\n"
        f"print([m for m in {EXTRAS.split()!r} if m in set(sys.modules) - before])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert outcore.__version__ == project["version"]


def test_public_names_are_few_and_there() -> None:
    public = {name for name in vars(outcore) if not name.startswith("_")}
    assert {"Graph", "Job", "OutcoreError", "capture"} <= public
