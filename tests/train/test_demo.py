"""The demo: everything it claims is in its figures."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

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
