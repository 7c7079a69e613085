"""The demo: everything it claims is in its figures."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from outcore.cli.demo import demo
from outcore.errors import TrainError
from outcore.train.demo import Demo
from tests.cli.command import outcore_command


def test_the_demo(tmp_path: Path) -> None:
    shown = outcore_command("demo", "--side", "512", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    figures = json.loads(shown.stdout)
    facts = figures["facts"]
    assert figures["agreement"] < 1e-12
    assert facts["forecast"]["peak_bytes"] > 2 * facts["budget_bytes"] > 2 * facts["measured"]["peak_bytes"]
    assert facts["ended"] == "finished" and (tmp_path / "outcore-demo" / "run" / "report.html").exists()


def test_the_two_commands_of_the_readme_run_in_their_order_and_do_not_meet() -> None:
    """What the demo writes into a checkout is neither linted nor committed; CI does what the README says."""
    root = Path(__file__).parents[2]
    folder = inspect.signature(demo).parameters["folder"].default.name
    assert folder in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["extend-exclude"]
    assert f"{folder}/" in (root / ".gitignore").read_text().splitlines()
    commands = [line for line in (root / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make demo", "make test"]
    readme = (root / "README.md").read_text()
    assert readme.index("    make demo") < readme.index("    make test")


@pytest.mark.parametrize("file", ["thesis.tex", "job.py"])
def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("def model(): ...")
    with pytest.raises(TrainError, match="is not a folder of the demo"):
        Demo(tmp_path, Console(quiet=True), side=256).run()
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_an_interrupted_demo_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("outcore.train.demo.write_slides", mock.Mock(side_effect=KeyboardInterrupt))
        Demo(tmp_path, Console(quiet=True), side=256).run()
    (tmp_path / "notes").touch()
    assert Demo(tmp_path, Console(quiet=True), side=256, slides=2, epochs=1).run()["facts"]["ended"] == "finished"
    assert (tmp_path / "notes").exists()
