"""`outcore plan` for one device and `outcore verify` as typed."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_budget_too_small_names_one_that_works(tmp_path: Path) -> None:
    refused = outcore_command("plan", *UNET, "--machine", "v100", "--memory", "1MiB", folder=tmp_path)
    assert refused.returncode == 1 and "smallest budget" in refused.stderr
    assert outcore_command("verify", UNET[0], "none.json", *UNET[1:], folder=tmp_path).returncode == 1


def test_verify_without_a_plan(tmp_path: Path) -> None:
    checked = outcore_command("verify", *UNET, "--device", "cpu", "--steps", "1", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "verdict: bitwise equal" in checked.stdout
    assert "after 1 step\n" in checked.stdout and " plain (predicted)" in checked.stdout


def test_a_plan_that_does_nothing_is_said_to_compare_little(tmp_path: Path) -> None:
    model, batch = "    return torch.nn.Linear(4, 4)", "    return torch.rand(size, 4), None"
    (tmp_path / "job.py").write_text(f"import torch\ndef model():\n{model}\ndef batch(size):\n{batch}\n")
    checked = outcore_command("verify", "job.py", "--device", "cpu", "--steps", "1", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "takes as much as plain training" in checked.stdout and "give a budget: --memory 70%" in checked.stdout
