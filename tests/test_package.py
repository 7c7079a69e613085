"""The package as a whole: light to import, nothing optional, version in one place, imports that go one way."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import outcore

EXTRAS = "torchvision monai timm transformers sklearn plotly starlette pygls optuna openslide tifffile zarr triton"


FRESH = f"""
import sys
import outcore
assert not sys.modules.keys() & {{"torch", *{EXTRAS.split()!r}}}, "importing the package waits for nothing"
import torch
before = set(sys.modules)
assert outcore.Job
assert not (sys.modules.keys() - before) & {{*{EXTRAS.split()!r}}}, "no extra is imported that is not used"
assert callable(outcore.within)
named = [outcore.scan.GRU, outcore.data.open_slide, outcore.stream.stream, outcore.fuse, outcore.run.read_weights]
assert all(map(callable, [*named, outcore.Engine])), "what is imported when first used is there"
"""


def test_a_fresh_process_imports_what_it_uses_when_it_uses_it() -> None:
    shown = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert outcore.__version__ == project["version"]


def test_public_names_are_few_and_there() -> None:
    public = set(dir(outcore)) - {"__version__"}
    assert {"Graph", "Job", "OutcoreError", "capture", "memory_of", "plan"} <= public
    assert all(not name.startswith("_") and hasattr(outcore, name) for name in public)
    beside = {path.stem for path in Path(outcore.__file__).parent.iterdir()}
    assert not set(outcore._NAMES) & beside, "a function is not hidden by a file of its name"
    assert not public & {"sys", "Any", "TYPE_CHECKING", "import_module", "planner", "errors", "cost"}


def test_imports_go_one_way() -> None:
    """Between folders, and between them and the files beside them; also those that are made when first used."""
    root = Path(outcore.__file__).parent
    below: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        unit = file.relative_to(root).parts[0].removesuffix(".py")
        if unit == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outcore"):
                for name in node.names:
                    used = f"{node.module}.{name.name}".split(".")[1]
                    below.setdefault(unit, set()).update({used} - {unit})
    order = list(graphlib.TopologicalSorter(below).static_order())  # raises where there is a circle
    assert len(order) > 15 and order.index("errors") < order.index("graph") < order.index("run") < order.index("cli")
