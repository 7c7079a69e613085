"""`outcore machine`: one of the catalogue, all of it, this one; saved, printed, calibrated or interrupted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.machine import Machine, names, parse
from tests.cli.command import outcore_command


def test_a_machine_of_the_catalogue_is_shown_and_saved(tmp_path: Path) -> None:
    shown = outcore_command("machine", "--on", "a100", "-o", "m.json", folder=tmp_path)
    assert shown.returncode == 0 and "wrote m.json" in shown.stderr and "A100" in shown.stdout
    assert Machine.load(tmp_path / "m.json") == parse("a100")
    as_json = outcore_command("machine", "--on", "a100", "--json", folder=tmp_path)
    assert Machine.from_json(json.loads(as_json.stdout)) == parse("a100")
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
    refused = outcore_command("machine", "--on", "a100", "--calibrate")
    assert refused.returncode == 1 and "only this machine can be calibrated" in refused.stderr


def test_the_catalogue_lists_every_machine_with_where_its_figures_come_from() -> None:
    rows = json.loads(outcore_command("machine", "--list", "--json").stdout)
    assert set(rows) == set(names()) and all(row["source"] for row in rows.values())
    table = outcore_command("machine", "--list").stdout
    assert all(any(name in line.lower() for line in table.splitlines()) for name in ("h100", "v100"))


def test_probing_tells_its_steps_and_an_interruption_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def probe(*, fresh: bool, progress: Callable[[int, int, str], None]) -> Machine:
        asked.append(fresh)
        progress(1, 3, "copies")
        return parse("v100")

    monkeypatch.setattr("outcore.cli.machine.probe", probe)
    shown = outcore_command("machine", "--fresh")
    assert shown.returncode == 0 and "1/3 copies" in shown.stderr and "V100" in shown.stdout
    quiet = outcore_command("machine", "--json")
    assert not quiet.stderr and json.loads(quiet.stdout) and asked == [True, False]

    def interrupted(**_: Any) -> Machine:
        raise KeyboardInterrupt

    monkeypatch.setattr("outcore.cli.machine.probe", interrupted)
    shown = outcore_command("machine")
    assert shown.returncode == 130 and "what was measured is kept" in shown.stderr


def test_a_calibration_says_how_far_off_it_is_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def calibrate(device: Any, place: str, *, dtypes: Any, seconds: float, progress: Any) -> Any:
        asked.append((device.name, place, dtypes, seconds))
        progress(1.0, 2.0, "convolutions")
        return [
            SimpleNamespace(
                dtype="tf32",
                models={"conv/forward": SimpleNamespace(samples=120)},
                errors=lambda: {"conv": (120, "forest", 0.05, 0.2)},
            )
        ]

    monkeypatch.setattr("outcore.cli.machine.probe", lambda **_: parse("v100"))
    monkeypatch.setattr("outcore.cost.measured.calibrate.calibrate", calibrate)
    shown = outcore_command("machine", "--calibrate", "--seconds", "9")
    assert asked == [(parse("v100").devices[0].name, "cuda:0", ("tf32", "bf16"), 9.0)]
    assert re.search(r"conv +120 +forest +5\.0% +20\.0%", shown.stderr) and shown.returncode == 0
    assert shown.stderr.endswith("-tf32.json.gz\n")  # where it is kept
