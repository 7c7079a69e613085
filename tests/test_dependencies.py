"""What src imports is what pyproject declares: the core without asking, the rest as extras."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outcore.cost.predicted import regression
from outcore.errors import MachineError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "pyyaml": {"yaml"}, "scikit-learn": {"sklearn"}, "pillow": {"PIL"}, "openslide-python": {"openslide"},
    "openslide-bin": set(), "imagecodecs": set(), "tensorboard": set(), "tensorflow-cpu": set(),
}  # fmt: skip
"""What a package is imported as, where that is not its name; none where another package loads it."""
WITH_TORCH = {"triton"}
"""What torch brings along where it can be used."""
OF_WORKERS = {"test", "docs"}
"""Extras of who works on the project."""


def declared(rows: list[str]) -> set[str]:
    """The modules of some requirements."""
    names = (re.split(r"[\[<>=~!; ]", row)[0].lower() for row in rows)
    return {module for name in names for module in MODULES.get(name, {name.replace("-", "_")})}


@functools.cache
def imported() -> dict[str, tuple[set[Path], bool]]:
    """Packages that src imports: where, and whether anywhere at the top of a module (and not for types alone)."""
    found: dict[str, tuple[set[Path], bool]] = {}
    own = {"outcore", *sys.stdlib_module_names}
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for package in {name.partition(".")[0] for name in names} - own:
                places, top = found.get(package, (set(), False))
                found[package] = places | {path}, top or node in tree.body
    return found


def test_everything_that_is_imported_is_declared() -> None:
    extras = {name: declared(rows) for name, rows in PROJECT["optional-dependencies"].items() if name not in OF_WORKERS}
    known = declared(PROJECT["dependencies"]).union(*extras.values(), WITH_TORCH)
    assert {name: places for name, (places, _) in imported().items() if name not in known} == {}


def test_what_a_module_imports_at_its_top_needs_no_extra() -> None:
    core = declared(PROJECT["dependencies"]) | WITH_TORCH
    assert {name: places for name, (places, top) in imported().items() if top and name not in core} == {}


def test_every_dependency_and_every_extra_is_imported_somewhere() -> None:
    used = imported().keys()
    for name, rows in PROJECT["optional-dependencies"].items():
        if name not in OF_WORKERS:
            assert declared(rows) <= used, name
    assert declared(PROJECT["dependencies"]) <= used


def test_a_calibration_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = regression.importlib.util.find_spec
    monkeypatch.setattr(regression.importlib.util, "find_spec", lambda n, *a: None if n == "sklearn" else find(n, *a))
    with pytest.raises(MachineError, match=r"needs scikit-learn.*pip install 'outcore\[calibrate\]'"):
        regression.check_can_fit()


def test_every_package_that_make_test_installs_is_pinned() -> None:
    """From the requirements of the tests and of the build, through those of each package that is installed."""
    rows = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(row.partition("==")[0]) for row in rows if "==" in row}
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"], "hatchling", "editables"]
    found, seen = [Requirement(row) for row in asked], set[str]()
    while found:
        needed = found.pop()
        name = canonicalize_name(needed.name)
        for extra in ("", *needed.extras):
            if f"{name}[{extra}]" in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            seen.add(f"{name}[{extra}]")
            exact = any(part.operator == "==" and "*" not in part.version for part in needed.specifier)
            assert name in pinned or exact, name  # torch names exact versions of the CUDA libraries itself
            with suppress(metadata.PackageNotFoundError):  # of the build
                for row in metadata.requires(name) or []:
                    further = Requirement(row)
                    if further.marker is None or further.marker.evaluate({"extra": extra}):
                        further.marker = None
                        found.append(further)
    assert len(seen) > 100
