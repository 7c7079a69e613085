"""The report of a run: made of its files alone, at any time, and drawn by a real browser without complaint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from outcore.errors import OutcoreError
from outcore.report import run_bundle
from outcore.report.run import read_run, thin
from tests.cli.command import outcore_command

from .running import BREAK, run, write_job


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run(write_job(folder), folder / "run", "train.epochs=2", "plan.memory=1GiB")
    return folder / "run"


def test_everything_is_in_the_bundle(finished: Path) -> None:
    made = run_bundle(finished)
    found = made["run"]
    assert made["graph"]["blocks"] and found["steps"]["step"] == list(range(12))
    assert len(found["epochs"]["validation_loss"]) == 2 and found["budget_bytes"] == 2**30
    assert found["forecast"]["peak_bytes"] > 0 and found["measured"]["step_s"] > 0
    assert "train:" in found["config"] and found["environment"]["torch"]


def test_the_command(finished: Path, tmp_path: Path) -> None:
    shown = outcore_command("report", str(finished), "--json")
    assert json.loads(shown.stdout)["ended"] == "finished"
    shown = outcore_command("report", str(finished), "-o", str(tmp_path / "page.html"))
    assert shown.returncode == 0 and "/run" in (tmp_path / "page.html").read_text()
    assert shown.stdout == f"wrote {tmp_path / 'page.html'}\n"
    with mock.patch("typer.launch") as opened:
        assert outcore_command("report", str(finished)).stdout == f"wrote {finished / 'report.html'}\n"
        assert not opened.called
        outcore_command("report", str(finished), "--open")
    opened.assert_called_once_with((finished / "report.html").as_uri())
    shown = outcore_command("report", str(tmp_path))
    assert shown.returncode == 1 and "holds no run; a run is made by: outcore train" in shown.stderr


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(write_job(tmp_path, stop_at=(3,), how=BREAK), tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert found["ended"] == "failed" and "the power went out" in found["error"]
    assert len(found["steps"]["loss"]) == 3 and (tmp_path / "run" / "report.html").exists()


def test_a_run_without_its_graph_is_still_a_report(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "graph.json").unlink()
    assert "graph" not in run_bundle(tmp_path / "run")
    with pytest.raises(OutcoreError, match="holds no run"):
        run_bundle(tmp_path)


def test_thinning_keeps_every_spike() -> None:
    values: list[float | None] = [1.0] * 10_000
    values[1234], values[7777], values[50] = 9.0, -3.0, None
    kept = thin(range(10_000), values, most=200)
    assert len(kept) <= 210 and {0, 1234, 7777, 9999} <= set(kept) and kept == sorted(kept)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True], ids=["with graph", "without"])
def test_a_browser_draws_it_without_complaint(finished: Path, tmp_path: Path, hidden: bool) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")
    shutil.copytree(finished, tmp_path / "run")
    if hidden:
        (tmp_path / "run" / "graph.json").unlink()
        assert outcore_command("report", str(tmp_path / "run")).returncode == 0
    page = (tmp_path / "run" / "report.html").as_uri()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000")
    shown = subprocess.run([browser, *options, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints
    assert len(re.findall(r'<figure class="chart"', shown.stdout)) >= 5
    assert "Predicted beside measured" in shown.stdout and "NaN" not in re.sub(r"<script.*?</script>", "", shown.stdout)


def test_the_command_that_was_typed_is_in_the_report(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks it was that of a process that the command had started."""
    import sys

    from outcore.train.launch import COMMAND, command_variable
    from outcore.train.run_folder.closing import typed_command

    monkeypatch.setattr(sys, "argv", ["/some/where/outcore", "train", "my job.py", "--ranks", "2"])
    assert typed_command() == "outcore train 'my job.py' --ranks 2"
    told = command_variable()[COMMAND]
    monkeypatch.setattr(sys, "argv", ["-m", "train", "runs/x/config.yaml"])
    monkeypatch.setenv(COMMAND, told)
    assert typed_command() == "outcore train 'my job.py' --ranks 2"
    found = read_run(finished)
    assert found["commands"] and found["environment"]["ranks"] == 1 and found["environment"]["processors"]
    assert found["measured"]["examples_per_s"] > 0
