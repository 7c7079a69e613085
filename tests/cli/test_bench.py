"""`outcore bench`: which families run, what is written and printed, and the comparison with another machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outcore.bench.families import FAMILIES
from outcore.bench.suite import BenchResult, FamilyResult, run_suite
from outcore.errors import WhatIfError
from outcore.machine import parse
from tests.cli.command import outcore_command

FOUND = BenchResult(
    "a GPU", "2.13", "2026-11-18", True,
    (
        FamilyResult("image", 4, 0.5, 8.0, 0.75, {"tf32": 0.25}, 0.5, {"weights": 1 << 20, "inputs": 0}, 1 << 20),
        FamilyResult("speech", 2, error="out of memory"),
        FamilyResult("text", 1, 1.0, 1.0, None, {}, 1.0, {"saved_tensors": 2048}, 2048),
    ),
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the suite was asked for; it answers at once, family by family."""
    found: list[dict[str, Any]] = []

    def run(names: list[str], *, each: Callable[[BenchResult], None], **options: Any) -> BenchResult:
        found.append({"names": names, **options})
        each(FOUND)
        return FOUND

    monkeypatch.setattr("outcore.bench.suite.run_suite", run)
    return found


def test_all_families_run_unless_some_are_named(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out, page = tmp_path / "here.json", tmp_path / "here.html"
    shown = outcore_command("bench", "--seconds", "0.5", "-o", str(out), "--page", str(page), "--full")
    assert shown.returncode == 0 and json.loads(out.read_text()) == json.loads(json.dumps(FOUND.to_json()))
    assert "out of memory" in page.read_text() and f"wrote {out}" in shown.stderr
    assert asked[0]["names"] == list(FAMILIES) and asked[0]["seconds"] == 0.5 and asked[0]["reduced"] is False
    shown = outcore_command("bench", "--only", "recommendation, reinforcement", "--json")
    assert json.loads(shown.stdout)["families"] == [asdict(f) for f in FOUND.families]
    assert asked[1]["names"] == ["recommendation", "reinforcement"]
    assert asked[1]["reduced"] == (asked[1]["device"].kind == "cpu")
    assert outcore_command("bench", "--only", "speach").returncode == 1 and len(asked) == 2


def test_rows_say_what_was_reached_and_how_much_more_than_elsewhere(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = outcore_command("bench").stdout
    assert "over the other" not in alone
    (row,) = [line.split() for line in alone.splitlines() if line.lstrip().startswith("image")]
    assert row == ["image", "4", "500", "ms", "8.0", "75%", "tf32", "25%", "50%", "1.0", "MiB", "weights", "1.0", "MiB"]
    assert any("speech" in line and "out of memory" in line for line in alone.splitlines())
    there = tmp_path / "there.json"
    there.write_text(json.dumps({"families": [{"family": "image", "samples_per_s": 2.0}, {"family": "text"}]}))
    beside = outcore_command("bench", "--against", str(there)).stdout
    (row,) = [line for line in beside.splitlines() if line.lstrip().startswith("image")]
    assert "over the other" in beside and "4.00x" in row and "reduced size" in beside
    for wrong in ("{}", '{"families": [1]}', '{"families": {}}'):
        there.write_text(wrong)
        refused = outcore_command("bench", "--against", str(there))
        assert refused.returncode == 1 and "is not a result of outcore bench" in refused.stderr
    assert len(asked) == 2


def test_a_family_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(setup: Any, device: Any, seconds: float) -> FamilyResult:
        if "reinforcement" in setup.job.name:
            raise WhatIfError("no room\nfor it")
        return FamilyResult(setup.job.name, setup.batch, 1.0, 2.0)

    monkeypatch.setattr("outcore.bench.suite._run", run)
    told, left = list[str](), list[int]()
    found = run_suite(
        ["reinforcement", "recommendation"], reduced=True, device=parse("v100").devices[0],
        progress=told.append, each=lambda so_far: left.append(len(so_far.families)),
    )  # fmt: skip
    assert [f.error for f in found.families] == ["no room", ""] and left == [1, 2]
    assert (
        told == [f.family for f in found.families] and found.reduced and found.device == parse("v100").devices[0].name
    )
