"""`outcore train` as typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cli.command import outcore_command

from .running import table, write_job


def test_options_settings_and_a_file_are_the_same_run(tmp_path: Path) -> None:
    write_job(tmp_path)
    common = ("--device", "cpu", "--epochs", "1", "--batch", "6")
    shown = outcore_command("train", "job.py", *common, "--out", "a", "optimizer.lr=0.01", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    resolved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert resolved["train"]["batch"] == 6 and resolved["optimizer"]["lr"] == 0.01
    shown = outcore_command("train", "a/config.yaml", "out=b", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert table(tmp_path / "a" / "steps.csv") == table(tmp_path / "b" / "steps.csv")
    assert "finished after 4 steps" in shown.stdout and "report: b/report.html" in shown.stdout


def test_the_batch_is_the_jobs_own(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text() + "\n\nsize = 5\n")
    shown = outcore_command("train", "job.py", "--device", "cpu", "--epochs", "1", folder=tmp_path)
    assert shown.returncode == 0 and " batch 5\n" in re.sub(" +\n", "\n", shown.stdout), shown.stdout


def test_figures_as_json(tmp_path: Path) -> None:
    write_job(tmp_path)
    shown = outcore_command("train", "job.py", "--device", "cpu", "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["ended"] == "finished"


def test_a_class_with_its_input(tmp_path: Path) -> None:
    shown = outcore_command("train", "outcore.models:LeNet", "-i", "2x3x32x32", "--steps", "2", folder=tmp_path)
    assert shown.returncode == 1 and "the batches have no targets" in shown.stderr


def test_refusals_are_one_message(tmp_path: Path) -> None:
    write_job(tmp_path)
    for words, said in (
        (("job.py", "plan.memroy=1GiB"), "no setting plan.memroy; did you mean plan.memory"),
        (("job.py", "--data", "absent.csv"), "no table absent.csv"),
        (("absent.yaml",), "absent.yaml"),
        (("absent.py",), "no file absent.py"),
        (("job.py", "schedule.name=Cosine"), "schedule.name=Cosine is not in torch; did you mean CosineAnnealingLR"),
        (("job.py", "metrics=[f1]"), "no metric 'f1'; known are"),
        (("job.py", "watch=f1"), "watch=f1 is no figure; known are loss, accuracy"),
        (("job.py", "metrics=[accuracy]", "watch=auc"), "measures only the loss and accuracy"),
    ):
        shown = outcore_command("train", *words, folder=tmp_path)
        assert shown.returncode == 1 and said in shown.stderr and "Traceback" not in shown.stderr
        assert not shown.stdout and not (tmp_path / "runs").exists()  # before anything was planned or written


def test_the_start_says_what_will_be_done(tmp_path: Path) -> None:
    write_job(tmp_path)
    shown = outcore_command("train", "job.py", "--device", "cpu", "--epochs", "1", folder=tmp_path)
    for word in ("train ", "network ", "data ", "plain step ", "expected ", "run "):
        assert f"\n{word}" in "\n" + shown.stdout


def test_a_mistake_in_the_job_names_its_line_and_shows_its_own_traceback_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text() + "\n\ndef loss(output, target):\n    return output.mean() / nothing\n")
    line = len(job.read_text().splitlines())
    shown = outcore_command("train", "job.py", "--device", "cpu", folder=tmp_path)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    assert f"error: NameError: name 'nothing' is not defined at {job}:{line}; " in shown.stderr
    monkeypatch.setenv("OUTCORE_TRACEBACK", "1")
    shown = outcore_command("train", "job.py", "--device", "cpu", folder=tmp_path)
    assert shown.returncode == 1 and shown.stderr.endswith("NameError: name 'nothing' is not defined\n")
    assert ", in loss\n" in shown.stderr and "typer" not in shown.stderr
