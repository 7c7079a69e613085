"""Nothing that a command reads is destroyed by what it writes, whichever option names it."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from outcore.cli.common.places import _FILES, _READ, check_files
from outcore.cli.main import _FILES as MODULES
from outcore.cli.main import _FOLDERS, COMMANDS
from outcore.errors import OutcoreError
from tests.cli.command import outcore_command

JOB = "import net\n\n\ndef model():\n    return net.Net()\n\n\ndef batch(size):\n    return net.batch(size), None\n"
NET = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"


def parameters(command: str) -> set[str]:
    function: Any = getattr(importlib.import_module(f"outcore.cli.{MODULES.get(command, command)}"), command)
    return set(function.__annotations__)


WRITING = [
    (command, name, option)
    for command in COMMANDS
    if command not in _FOLDERS
    for name, option in _FILES.items()
    if name in parameters(command)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "v100.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("v100.json")
    os.link(tmp_path / "v100.json", tmp_path / "hard.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.csv").write_text("step,loss\n")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(("command", "name", "option"), WRITING, ids=lambda value: str(value))
def test_no_option_of_any_command_destroys_what_it_reads(command: str, name: str, option: str, folder: Path) -> None:
    before, given = files(folder), parameters(command)
    words: list[str] = []
    if "job" in given:
        words.append("job.py")
    if "run" in given and "job" not in given:
        words.append("run")
    if "plan_file" in given:
        words.append("v100.json")
    targets = ["job.py", "net.py"] if "job" in given else ["run/steps.csv"] if "run" in given else []
    targets += ["v100.json", "link.json", "hard.json"] if "plan_file" in given else []
    for read, named in (
        ("--stages", "stages"),
        ("--on", "on"),
        ("--on", "machine"),
        ("--on", "name"),
        ("--against", "against"),
    ):
        if named in given and "plan_file" not in given:
            targets += [f"{read}=v100.json {target}" for target in ("v100.json", "link.json", "hard.json")]
    assert targets
    for target in targets:
        more, _, path = target.rpartition(" ")
        shown = outcore_command(command, *words, *more.split(), option, path, folder=folder)
        assert shown.returncode == 1 and not shown.stdout, (target, shown)
        assert shown.stderr.startswith(f"error: {option} {path} would destroy "), (target, shown.stderr)
        assert files(folder) == before


def test_two_results_are_two_files(folder: Path) -> None:
    for (one, first), (two, second) in itertools.permutations(_FILES.items(), 2):
        with pytest.raises(OutcoreError, match=r"name the same file, .*out\.svg; name two"):
            check_files({one: folder / "out.svg", two: folder / "run" / ".." / "out.svg"})
        check_files({one: folder / "a.svg", two: folder / "b.svg"})
        check_files({one: Path(os.devnull), two: Path(os.devnull)})
        assert first != second


def test_what_is_named_to_be_read_is_a_parameter_of_some_command() -> None:
    assert set(_READ) <= set().union(*map(parameters, COMMANDS))


def test_a_page_of_a_run_may_be_replaced_in_its_folder(folder: Path) -> None:
    (folder / "run" / "report.html").write_text("<html>")
    check_files({"run": folder / "run", "output": folder / "run" / "report.html"})
    with pytest.raises(OutcoreError, match="would destroy a part of the run"):
        check_files({"run": folder / "run", "output": folder / "run" / "steps.csv"})
