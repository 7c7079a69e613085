"""`outcore plan` for one device and `outcore verify` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outcore.machine.units import format_bytes
from outcore.program import Timeline
from outcore.program.plan.document import Plan
from tests.cli.command import outcore_command

UNET = ["outcore.models:UNet", "--input", "4x3x64x64", "--arg", "width=8", "--arg", "depth=2"]


def test_a_plan_for_one_device_is_explained_drawn_and_verified(tmp_path: Path) -> None:
    made = outcore_command(
        "plan", *UNET, "--machine", "v100", "--memory", "7MiB", "-o", "p.json", "--svg", "f.svg", folder=tmp_path
    )
    assert made.returncode == 0, made.stderr
    assert "of plain" in made.stdout and "time against memory" in made.stdout
    plan = Plan.load(tmp_path / "p.json")
    assert plan.policy and plan.predicted is not None and plan.predicted.peak_bytes[0] <= 7 * 2**20
    assert (tmp_path / "f.svg").read_text().startswith("<svg")
    checked = outcore_command("verify", UNET[0], "p.json", *UNET[1:], "--device", "cpu", "--json", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    verdict = json.loads(checked.stdout)
    assert verdict["grade"] == "bitwise equal" and verdict["plain_bytes"] > verdict["planned_bytes"]


def test_a_plan_in_tiles_is_drawn_beside_the_plans_without_them(tmp_path: Path) -> None:
    words = ["outcore.models:SlideNet", "-i", "1x3x512x512", "--memory", "4MiB", "-o", "p.json", "--svg", "f.svg"]
    made = outcore_command("plan", *words, folder=tmp_path)
    assert made.returncode == 0 and Plan.load(tmp_path / "p.json").stream is not None, made.stderr
    assert made.stderr.splitlines()[-2:] == ["wrote p.json", "wrote f.svg"]
    drawn = (tmp_path / "f.svg").read_text()
    assert "this plan, in tiles, " in drawn and "fastest step for its memory" in drawn
    shown = outcore_command("profile", *words[:3], "--json", folder=tmp_path)
    plain = json.loads(shown.stdout)["profiles"][0]["memory"]["peak_bytes"]
    checked = outcore_command("verify", words[0], "p.json", *words[1:3], "--device", "cpu", "--json", folder=tmp_path)
    assert json.loads(checked.stdout)["plain_bytes"] == plain  # one number, also beside a plan in tiles


def test_a_step_in_tiles_has_one_peak_and_one_time_in_every_command(tmp_path: Path) -> None:
    """Images are read tile by tile, so they are in none of the peaks; what they would take is said beside it."""
    network, budget = ["outcore.models:SlideNet", "-i", "1x3x512x512"], ["--memory", "4MiB"]
    profiled = json.loads(outcore_command("profile", *network, "--json", folder=tmp_path).stdout)["profiles"][0]
    made = outcore_command("plan", *network, *budget, "-o", "p.json", folder=tmp_path)
    words = " ".join(made.stdout.split())
    plan = Plan.load(tmp_path / "p.json")
    assert plan.stream is not None and plan.predicted is not None
    (peak,), step_s = plan.predicted.peak_bytes, plan.predicted.time_s
    assert peak <= 4 * 2**20 and "as tensors on the device they would take 3.0 MiB more" in words
    plain_bytes, plain_s = profiled["memory"]["peak_bytes"], profiled["step_s"]
    assert f"of plain {format_bytes(plain_bytes)}), step {step_s / plain_s:.2f}x of plain" in words
    shown = outcore_command("simulate", network[0], "p.json", *network[1:], "--json", folder=tmp_path)
    timeline = Timeline.from_json(json.loads(shown.stdout))
    assert timeline.step_s == pytest.approx(step_s, rel=1e-6) and timeline.peak_bytes[0] == pytest.approx(peak, abs=1)
    for words_of_plan in (["p.json"], budget):
        given = [network[0], *words_of_plan, *network[1:], "--device", "cpu", "--json"]
        verdict = json.loads(outcore_command("verify", *given, folder=tmp_path).stdout)
        # A job without a loss is planned with a usual one, of two numbers here; to verify it another is made up.
        assert verdict["planned_bytes"] == pytest.approx(peak, abs=8)
        assert verdict["plain_bytes"] == plain_bytes and verdict["agrees"]


def test_a_budget_too_small_names_one_that_works(tmp_path: Path) -> None:
    refused = outcore_command("plan", *UNET, "--machine", "v100", "--memory", "1MiB", folder=tmp_path)
    assert refused.returncode == 1 and "smallest budget" in refused.stderr
    assert outcore_command("verify", UNET[0], "none.json", *UNET[1:], folder=tmp_path).returncode == 1


def test_verify_without_a_plan(tmp_path: Path) -> None:
    checked = outcore_command("verify", *UNET, "--device", "cpu", "--steps", "1", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "verdict: bitwise equal" in checked.stdout
    assert "after 1 step\n" in checked.stdout and "MiB) (predicted)" in checked.stdout
    assert "x of plain" not in checked.stdout and " +" not in checked.stdout  # times of calls are not known here


def test_a_plan_that_does_nothing_is_said_to_compare_little(tmp_path: Path) -> None:
    model, batch = "    return torch.nn.Linear(4, 4)", "    return torch.rand(size, 4), None"
    (tmp_path / "job.py").write_text(f"import torch\ndef model():\n{model}\ndef batch(size):\n{batch}\n")
    checked = outcore_command("verify", "job.py", "--device", "cpu", "--steps", "1", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    words = " ".join(checked.stdout.split())
    assert "takes as much as plain training" in words and "give a budget: --memory 70%" in words


def test_a_refusal_of_a_network_without_images_is_one_sentence(tmp_path: Path) -> None:
    layers = "torch.nn.Sequential(*(m for _ in range(6) for m in (torch.nn.Linear(32, 32), torch.nn.Tanh())))"
    batch = "    return torch.rand(size, 32), None"
    (tmp_path / "job.py").write_text(f"import torch\ndef model():\n    return {layers}\ndef batch(size):\n{batch}\n")
    for command in ("plan", "verify"):
        refused = outcore_command(command, "job.py", "-b", "64", "--memory", "20KiB", folder=tmp_path)
        assert refused.returncode == 1 and refused.stderr.count("cannot be done within") == 1, refused.stderr
        assert "tiles do not help: no input is an image" in refused.stderr and refused.stderr.count("; give ") == 1


LONG = """
import collections, torch

def model():
    inner = torch.nn.Sequential(collections.OrderedDict(a_layer_with_a_rather_long_name=torch.nn.Linear(4, 4)))
    return torch.nn.Sequential(collections.OrderedDict(another_long_name_around_it=inner))

def batch(size):
    return torch.rand(size, 4), None
"""


def test_a_long_name_of_a_parameter_is_whole_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "job.py").write_text(LONG)
    checked = outcore_command("verify", "job.py", "--device", "cpu", "--steps", "1", folder=tmp_path)
    assert checked.returncode == 0 and "…" not in checked.stdout, checked.stderr
