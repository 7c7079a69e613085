"""`outcore plan` and `outcore simulate` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outcore.program.plan.document import Plan
from tests.cli.command import outcore_command

UNET = ["outcore.models:UNet", "--input", "8x3x64x64", "--arg", "width=8", "--arg", "depth=2"]


def test_a_plan_is_made_saved_and_simulated(tmp_path: Path) -> None:
    made = outcore_command(
        "plan", *UNET, "--machine", "v100x4", "--schedule", "1f1b", "-n", "2", "-o", "plan.json", folder=tmp_path
    )
    assert made.returncode == 0, made.stderr
    assert "rank 1" in made.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.ranks == 2
    shown = outcore_command(
        "simulate", UNET[0], "plan.json", *UNET[1:], "--machine", "v100x4", "--trace", "t.json", folder=tmp_path
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "another machine" not in shown.stderr
    elsewhere = outcore_command("simulate", UNET[0], "plan.json", *UNET[1:], "--machine", "h100x2", folder=tmp_path)
    assert elsewhere.returncode == 0 and "another machine; these are the times of h100x2" in elsewhere.stderr


def test_an_image_is_shared_among_ranks(tmp_path: Path) -> None:
    made = outcore_command("plan", *UNET, "--machine", "v100x4", "--grid", "auto", "-o", "grid.json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "halo exchanges" in made.stdout
    plan = Plan.load(tmp_path / "grid.json")
    assert plan.ranks == 4 and sorted(plan.grid) in ([1, 4], [2, 2])
    shown = outcore_command("simulate", UNET[0], "grid.json", *UNET[1:], "--machine", "v100x4", folder=tmp_path)
    assert shown.returncode == 0 and "rank 3" in shown.stdout, shown.stdout


def test_a_unet_is_folded_onto_the_ranks_there_are(tmp_path: Path) -> None:
    made = outcore_command("plan", *UNET, "--machine", "v100x2", "--vertical", "-o", "fold.json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    plan = Plan.load(tmp_path / "fold.json")
    assert plan.ranks == 2 and plan.placement == (0, 1, 0)


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can() -> None:
    network = ["outcore.models:LeNet", "-i", "8x3x32x32"]
    refused = outcore_command("plan", *network, "--machine", "v100x2", "--memory", "64KiB")
    assert refused.returncode == 1
    assert "the smallest that can is" in refused.stderr


def test_wrong_use_says_why(tmp_path: Path) -> None:
    for arguments, message in (
        (["plan", *UNET, "--machine", "v100", "--memory", "lots"], "is not a size"),
        (["plan", *UNET, "--machine", "v100", "--schedule", "best"], "must be one of"),
        (["plan", *UNET, "--machine", "v100", "--grid", "²x2"], "must be auto or numbers like 2x2"),
        (["plan", *UNET, "--machine", "v100", "--grid", "9" * 30], "ranks; give 1,024 at most"),
        (["plan", *UNET, "--machine", "v100", "--level", "²"], "must be block, layer or a depth"),
        (["simulate", UNET[0], "none.json", *UNET[1:]], "no file none.json; make one with: outcore plan"),
    ):
        shown = outcore_command(*arguments, folder=tmp_path)
        assert shown.returncode != 0
        assert message in " ".join(shown.stderr.replace("│", "").split())
        assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no file stages.json; expected one with JSON"),
        (b"", "stages.json is not JSON: Expecting value in line 1, column 1"),
        (b"\xff\xfe{\x00}\x00", "stages.json is binary"),
        (b"[" * 100_000, "stages.json is not JSON that can be read"),
        (b"null", "the document is null; expected a list of at least 1; write the blocks of each stage"),
        (b"[]", "expected a list of at least 1"),
        (b'["conv1"]', "stages.json: [0] is 'conv1'; expected a list of at least 1"),
        (b'{"0": ["conv1"]}', "expected a list of at least 1"),
        (b"[[1], [2]]", "[0][0] is 1; expected text"),
        (b'[["conv1"], []]', "stages.json: [1] is []; expected a list of at least 1"),
        (b'[["nowhere"]]', "nowhere"),
    ],
)
def test_a_file_of_stages_is_read_or_refused_by_its_place(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "stages.json").write_bytes(content)
    words = ["outcore.models:LeNet", "-i", "4x3x32x32", "--on", "v100x2", "--stages", "stages.json"]
    shown = outcore_command("plan", *words, folder=tmp_path)
    assert shown.returncode == 1 and shown.stderr.startswith("error: ") and said in shown.stderr, shown.stderr
    assert "Traceback" not in shown.stderr


def test_ranks_that_mostly_wait_are_told_what_would_help() -> None:
    command = ("plan", "outcore.models:LeNet", "--machine", "v100x4", "-i")
    one = outcore_command(*command, "1x3x32x32", "--schedule", "model_parallel")
    many = outcore_command(*command, "2048x3x32x32")  # with 8 the host sets the pace, and ways to share them are alike
    assert one.stdout.startswith("4 stages, model_parallel\n") and "a larger --batch gives them" in one.stdout
    assert many.stdout.startswith("data parallel, 4 replicas") and "a larger --batch" not in many.stdout


TINY = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(size):
    return torch.randn(size, 6), torch.randint(3, (size,))
"""


@pytest.mark.parametrize("machine", ["h100", "h100x2"])
def test_a_plan_is_simulated_with_the_batch_it_was_made_for(tmp_path: Path, machine: str) -> None:
    (tmp_path / "job.py").write_text(TINY)
    made = outcore_command("plan", "job.py", "-b", "8", "--on", machine, "-o", "p.json", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert Plan.load(tmp_path / "p.json").samples == 8
    shown = outcore_command("simulate", "job.py", "p.json", "--on", machine, folder=tmp_path)
    assert "job.py, batch 8, on" in shown.stdout
    other = outcore_command("simulate", "job.py", "p.json", "-b", "4", "--on", machine, folder=tmp_path)
    assert "job.py, batch 4, on" in other.stdout


def test_a_plan_for_the_jobs_own_batch_names_none(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TINY)
    shown = outcore_command("plan", "job.py", "--on", "h100", "--json", folder=tmp_path)
    assert "samples" not in json.loads(shown.stdout)["plan"]["predicted"]
