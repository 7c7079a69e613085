"""docs/design/architecture.md is true: it lists the packages that there are, and imports go down its list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outcore"
PAGE = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")


def layers() -> list[list[str]]:
    """The packages of every row of the page's table, from the top."""
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE, re.MULTILINE)
    return [re.findall(r"`(\w+)`", row) for row in rows]


def packages() -> set[str]:
    """The packages and modules at the top of the project."""
    found = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    return found | {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}


def imported(path: Path) -> set[str]:
    """The packages that a file imports, but for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in typed:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outcore."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "outcore":
            names |= {alias.name for alias in node.names if alias.name in packages()}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("outcore.")}
    return names


def test_the_page_lists_every_package_once() -> None:
    listed = [name for row in layers() for name in row]
    assert sorted(listed) == sorted(packages())


@pytest.mark.parametrize("package", sorted(packages()))
def test_imports_go_down_the_list(package: str) -> None:
    place = {name: number for number, row in enumerate(layers()) for name in row}
    files = (SOURCE / package).rglob("*.py") if (SOURCE / package).is_dir() else [SOURCE / f"{package}.py"]
    upward = {
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in files
        for name in imported(file)
        if name != package and place[name] <= place[package]
    }
    assert not upward


def test_files_are_short_and_folders_are_a_page() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCE.rglob("*.py")}
    assert not {str(file.relative_to(SOURCE)): n for file, n in lengths.items() if n > 450}
    folders = {folder: len(list(folder.glob("*.py"))) for folder in (f.parent for f in lengths)}
    assert not {str(folder.relative_to(SOURCE)): n for folder, n in folders.items() if n > 20}
