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
    public = set(dir(outcore)) - {"__version__"}
    assert {"Graph", "Job", "OutcoreError", "capture", "memory_of", "plan"} <= public
    assert all(not name.startswith("_") and hasattr(outcore, name) for name in public)
    assert not public & {"sys", "Any", "TYPE_CHECKING", "import_module", "planner", "errors", "cost"}


def test_a_function_is_not_hidden_by_the_file_of_its_name() -> None:
    program = "import outcore, outcore.within; from outcore.within import release; assert callable(outcore.within)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_the_package_waits_for_nothing() -> None:
    program = "import sys, outcore; assert not sys.modules.get('torch'); assert outcore.Job and sys.modules['torch']"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_imported_when_first_used_is_there() -> None:
    names = ["scan.GRU", "data.open_slide", "stream.stream", "fuse", "run.read_weights", "Engine"]
    program = f"import outcore; assert all(map(callable, [{', '.join(f'outcore.{name}' for name in names)}]))"
    subprocess.run([sys.executable, "-c", program], check=True)


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
