"""A probe fills every number, is remembered, and loses nothing when interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outcore.cli.machine import machine as command
from outcore.machine import Machine, probe, probe_cpu, remembered
from outcore.machine.probe import _remember


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replaces the measuring by constants, and counts the calls."""
    calls: list[str] = []

    def fake(name: str, value: object) -> None:
        def measure(*_: object, **__: object) -> object:
            calls.append(name)
            return value

        monkeypatch.setattr(probe_cpu, name, measure)

    fake("measure_matmul", 1e11)
    fake("measure_copy", 2e10)
    fake("measure_dispatch", 2e-6)
    fake("measure_disk", (5e8, 2e9))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_a_probe_of_this_cpu_fills_every_number(tmp_path: Path) -> None:
    machine = probe(cache=tmp_path, devices=("cpu",))
    device = machine.device()
    print(machine)
    assert device.kind == "cpu" and device.sms and device.memory_bytes > 1 << 28
    assert device.bandwidth_bytes_per_s > 1e8
    assert {"fp32", "fp64"} <= set(device.rates)
    assert 1e-8 < device.dispatch_s < 1e-2
    assert machine.below(device).away_bytes_per_s > 1e5
    assert machine == remembered(cache=tmp_path, devices=("cpu",))
    assert Machine.from_json(machine.to_json()) == machine


def test_a_probe_is_reused_unless_fresh(quick: list[str]) -> None:
    first = probe(devices=("cpu",))
    made = len(quick)
    assert made > 0
    assert probe(devices=("cpu",)) == first and len(quick) == made
    probe(devices=("cpu",), fresh=True)
    assert len(quick) == 2 * made


def test_an_interrupted_probe_goes_on_where_it_stopped(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe_cpu, "measure_copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            probe(devices=("cpu",))
    assert quick == ["measure_matmul"] * 4
    partial = remembered(devices=("cpu",))
    assert partial.device().rates["fp32"] == 1e11 and partial.disk is None
    steps: list[str] = []
    probe(devices=("cpu",), progress=lambda done, total, words: steps.append(words))
    assert quick[4:] == ["measure_copy", "measure_dispatch", "measure_disk"]
    assert steps == ["cpu: memory copy", "cpu: starting an operation", "disk: write and read"]


def test_a_damaged_memory_is_measured_again(quick: list[str], tmp_path: Path) -> None:
    probe(devices=("cpu",))
    (kept,) = (tmp_path / "outcore").glob("machine-*.json")
    kept.write_text("{")
    assert probe(devices=("cpu",)).device().rates["fp32"] == 1e11


def test_the_command_shows_lists_saves_and_explains(quick: list[str], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    runner = CliRunner()
    shown = runner.invoke(app, [])
    assert shown.exit_code == 0 and "memory copy" in shown.output
    saved = tmp_path / "saved.json"
    as_json = runner.invoke(app, ["--json", "--on", "v100x8", "-o", str(saved)])
    assert as_json.exit_code == 0 and '"fingerprint"' in as_json.output
    assert Machine.load(saved).ranks == 8
    listed = runner.invoke(app, ["--list"])
    assert listed.exit_code == 0 and "mi300x" in listed.output
    assert runner.invoke(app, ["--list", "--json"]).exit_code == 0
    wrong = runner.invoke(app, ["--on", "v10"])
    assert "did you mean v100" in str(wrong.exception)


def test_importing_machines_does_not_import_sklearn() -> None:
    code = "import sys, outcore.machine; print('sklearn' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_home_that_takes_no_files_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="this machine is not kept .*XDG_CACHE_HOME names another folder"):
        _remember(tmp_path / "file" / "machine.json", {})
