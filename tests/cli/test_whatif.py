"""`outcore whatif` on the command line: tables, JSON, and refusals that leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outcore.cli.main import app
from outcore.errors import OutcoreError

JOB = """
import torch
from torch import nn
size = 8
def model(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
def batch(n): return torch.randn(n, 64), torch.randn(n, 8)
loss = nn.functional.mse_loss
optimizer = torch.optim.Adam
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def run(*words: str) -> str:
    found = CliRunner().invoke(app, ["whatif", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def test_every_question_is_answered_in_json_and_as_a_table(job: Path, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "found.json", tmp_path / "found.svg"
    asked = ["amp", "graphs+fused", "within=100%"]
    words = [word for question in asked for word in ("--if", question)]
    answers = json.loads(run(str(job), "--on", "h100", *words, "--json"))["if"][0]
    assert [row["question"] for row in answers["if"]] == asked and answers["if"][1]["gain"] > 1
    assert answers["if"][2]["peak_bytes"] == answers["as_it_is"]["peak_bytes"]
    rows = json.loads(run(str(job), "--on", "v100,a100", "--json"))["on"][0]["gpus"]
    assert [row["gpu"][:4] for row in rows] == ["Tesl", "A100"]
    shown = run(str(job), "--on", "v100", "--gpus", "1,2,4", "--link", "1gbe", "-o", str(saved), "--svg", str(drawn))
    assert "no longer hidden" in shown and "efficiency" in shown
    assert len(json.loads(saved.read_text())["scaling"][0]["points"]) == 6
    assert drawn.read_text().startswith("<svg") and "data parallel" in drawn.read_text()
    faster = json.loads(run(str(job), "--on", "v100", "--gpus", "2", "--link", "1gbe", "--if", "link=10x", "--json"))
    assert (
        faster["scaling"][0]["points"][0]["exposed_s"]
        < json.loads(saved.read_text())["scaling"][0]["points"][2]["exposed_s"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--if", "ampp"),
        ("--on", "h2o"),
        ("--on", "v100", "--gpus", "1,2", "--link", "wire"),
        ("--on", "v100", "--gpus", "1,2", "--how", "magic"),
        ("--on", "v100", "--if", "layer9=free"),
        (),
    ],
)
def test_what_is_not_known_is_refused_and_nothing_is_written(job: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises(OutcoreError):
        run(str(job), *words, "-o", str(tmp_path / "out.json"))
    assert {p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts} == before


def test_sentences_are_broken_at_the_width_of_the_terminal(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = run(str(job), "--on", "v100", "--gpus", "1,2", "--link", "1gbit")
    table, _, sentences = shown.partition("\n\n")
    assert max(map(len, table.splitlines())) > 60  # no column is cut
    assert sentences.strip() and max(map(len, sentences.splitlines())) <= 60
