"""One number for each quantity: time and peak of a plain step are the same in every command, and shares are shares of
them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.explore.parts import ExploreSettings, explore_bundle
from outcore.machine import format_time
from outcore.program import Timeline
from tests.cli.command import Shown, outcore_command

JOB = """
import torch
from torch import nn
from torch.nn import functional as F

def model():
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 16, 1))

def batch(size):
    return torch.rand(size, 3, 32, 32), torch.randint(16, (size, 32, 32))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
LOSS = """
def loss(output, target):
    return F.cross_entropy(output, target)
"""


def run(*words: str, code: int = 0) -> Shown:
    shown = outcore_command(*words)
    assert shown.returncode == code, shown.stderr
    return shown


def profiled(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("profile", *words, "--json").stdout)["profiles"][0]
    return found


def plain_peak(*words: str) -> int:
    return int(profiled(*words)["memory"]["peak_bytes"])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB + request.param)
    return "job.py"


@pytest.mark.parametrize("job", ["", LOSS], ids=["loss not given", "loss of every pixel"], indirect=True)
def test_a_plain_step_is_the_same_in_every_command(job: str, tmp_path: Path) -> None:
    plain = profiled(job)
    peak, step_s = int(plain["memory"]["peak_bytes"]), plain["step_s"]
    assert peak > 0 and plain["per_second"] == pytest.approx(plain["batch"] / step_s)
    said = run("plan", job).stdout
    shown = f"{peak / 2**10:.1f} KiB"
    assert f"of plain {shown})" in said and f"\n{shown} " in said  # the plan, and the first row of its frontier
    assert said.count(f" {format_time(step_s)} ") == 2 and f"plain: {format_time(step_s)} a step" in said
    assert json.loads(run("verify", job, "--json", "--memory", "90%").stdout)["plain_bytes"] == peak
    said = run("train", job, "--steps", "2", "--device", "cpu", "--memory", "150%", "--out", "run").stdout
    assert f"{1.5 * peak / 2**10:.1f} KiB, 150% of a plain step's" in said
    words = " ".join(said.split())
    assert "live tensors are counted; the process takes more" in words and "of live tensors, the whole process" in words
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["measured"]["process_bytes"] > 50 * 2**20 > facts["measured"]["peak_bytes"]
    assert facts["forecast"]["peak_bytes"] == peak
    assert facts["forecast"]["step_s"] == pytest.approx(step_s, rel=1e-6)
    took = facts["measured"]  # the first step, which prepares what later ones reuse, is in neither figure
    assert took["examples_per_s"] == pytest.approx(plain["batch"] / took["step_s"])
    rows = (tmp_path / "run" / "steps.csv").read_text().splitlines()
    second = dict(zip(rows[0].split(","), rows[2].split(","), strict=True))
    assert took["steps"] == 2 and took["step_s"] == pytest.approx(float(second["time_s"]), rel=1e-2)
    if (tmp_path / "job.py").read_text().endswith(LOSS):
        assert facts["measured"]["peak_bytes"] == pytest.approx(peak, rel=0.01)


TOKENS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(200, 32), nn.Linear(32, 200, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.words(tokens)))

def model():
    return Words()

def batch(size):
    tokens = torch.randint(200, (size, 12))
    return tokens, tokens.clone()

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""


@pytest.mark.parametrize("job", [TOKENS], ids=["tied weights, large outputs"], indirect=True)
def test_what_plain_training_needs_is_enough_in_every_command(job: str, tmp_path: Path) -> None:
    peak = plain_peak(job, "-b", "4")
    for budget, plain in ((peak, True), (peak - 1, False)):
        words = ("-b", "4", "--memory", str(budget))
        planned = outcore_command("plan", job, *words, "--devices", "1", "--json")
        trained = outcore_command("train", job, *words, "--steps", "2", "--device", "cpu", "--out", f"run{plain}")
        assert planned.returncode == trained.returncode, planned.stderr + trained.stderr
        assert not plain or planned.returncode == 0
    facts = json.loads((tmp_path / "runTrue" / "run.json").read_text())
    assert facts["measured"]["peak_bytes"] <= peak


@pytest.mark.parametrize("job", [LOSS + "\ndel optimizer\n"], ids=[""], indirect=True)
def test_a_job_without_an_optimizer_is_counted_alike_and_one_that_is_named_as_it_is(job: str, tmp_path: Path) -> None:
    peak = plain_peak(job)
    assert json.loads(run("verify", job, "--json", "--memory", "95%").stdout)["plain_bytes"] == peak
    forecasts = []
    for name in ("", "SGD", "AdamW"):
        words = [f"optimizer.name={name}", "optimizer.lr=0.1"] if name else []
        run("train", job, "--steps", "1", "--device", "cpu", "--out", f"run{name}", *words)
        forecasts.append(json.loads((tmp_path / f"run{name}" / "run.json").read_text())["forecast"])
    assert forecasts[0]["peak_bytes"] == peak
    assert forecasts[1]["peak_bytes"] < peak <= forecasts[2]["peak_bytes"]  # no state; two of them and a workspace
    assert forecasts[0]["peak_bytes"] == forecasts[2]["peak_bytes"]  # it is trained with AdamW
    assert forecasts[0]["step_s"] < forecasts[1]["step_s"] < forecasts[2]["step_s"]


WIDE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(200, 900), nn.ReLU(), nn.Linear(900, 900), nn.BatchNorm1d(900), nn.Linear(900, 5))

def batch(size):
    return torch.rand(size, 200), torch.randint(5, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

size = 4
"""
SEVERAL = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.facts, self.head = nn.Conv2d(3, 4, 3), nn.Linear(300, 4), nn.Linear(4, 3)

    def forward(self, image, facts):
        return {"logits": self.head(torch.relu(self.image(image)).mean((2, 3)) + self.facts(facts))}

def model():
    return Two()

def batch(size):
    return {"image": torch.rand(size, 3, 16, 16), "facts": torch.rand(size, 300)}, torch.randint(3, (size,))

def loss(output, target):
    return nn.functional.cross_entropy(output["logits"], target)

def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(WIDE, [], id="large layers, no optimizer"),
        pytest.param(WIDE, ["-b", "6"], id="another batch", marks=slow),
        pytest.param(SEVERAL, ["-b", "2"], id="several inputs and a dictionary", marks=slow),
        pytest.param(JOB + LOSS, [], id="convolutions", marks=slow),
        pytest.param(JOB + LOSS + "\ndel optimizer\n", ["-b", "2"], id="convolutions, no optimizer", marks=slow),
    ],
)
def test_every_command_says_the_same_of_a_plain_step_and_of_a_plan(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(text)
    plain = profiled("job.py", *words)
    step_s, peak = plain["step_s"], int(plain["memory"]["peak_bytes"])
    frontier = json.loads(run("profile", "job.py", *words, "--frontier", "--json").stdout)["frontier"]
    assert (frontier[0]["time_s"], frontier[0]["peak_bytes"]) == (pytest.approx(step_s), peak)
    made = json.loads(run("plan", "job.py", *words, "--devices", "1", "-o", "one.json", "--json").stdout)["plan"]
    assert made["predicted"]["time_s"] == pytest.approx(step_s) and made["predicted"]["peak_bytes"] == [peak]
    found = simulated("job.py", "one.json", *words)
    assert found["end"] == pytest.approx(step_s) and found["peak"] == pytest.approx(peak, rel=1e-3)
    asked = json.loads(run("whatif", "job.py", *words, "--if", "amp", "--json").stdout)["if"][0]["as_it_is"]
    assert (asked["step_s"], asked["peak_bytes"]) == (pytest.approx(step_s), peak)
    batch = int(words[1]) if words else None
    page = explore_bundle(ExploreSettings("job.py", batch=batch, seconds=0.0, search_s=0.03))
    assert (page["step"]["step_s"], page["memory"]["peak_bytes"]) == (pytest.approx(step_s), peak)
    run("train", "job.py", *words, "--steps", "2", "--device", "cpu", "--out", "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["forecast"]["peak_bytes"] == peak and facts["forecast"]["step_s"] == pytest.approx(step_s)
    assert facts["measured"]["peak_bytes"] == pytest.approx(peak, rel=0.02)
    two = run("plan", "job.py", *words, "--devices", "2", "-o", "two.json", "--json").stdout
    planned = json.loads(two)["predicted"]
    found = simulated("job.py", "two.json", *words)
    assert found["end"] == pytest.approx(planned["time_s"]) and found["peak"] == planned["peak_bytes"][0]


@pytest.mark.slow
@pytest.mark.parametrize("text", [WIDE, SEVERAL], ids=["large layers", "several inputs"])
def test_a_run_on_two_ranks_says_what_its_plan_says_and_takes_no_more(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(text)
    words = ["-b", "4", "--ranks", "2", "--steps", "3", "--device", "cpu", "--out", "run"]
    done = subprocess.run([sys.executable, "-m", "outcore", "train", "job.py", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    planned = json.loads(run("plan", "job.py", "-b", "4", "--devices", "2", "--json").stdout)["predicted"]
    assert facts["forecast"]["planned_peak_bytes"] == max(planned["peak_bytes"])
    assert facts["forecast"]["planned_step_s"] == pytest.approx(planned["time_s"])
    assert facts["measured"]["peak_bytes"] <= 1.05 * max(planned["peak_bytes"])


@pytest.mark.parametrize("job", [LOSS], ids=[""], indirect=True)
@pytest.mark.parametrize("on", [[], ["--on", "v100"]], ids=["here", "on a GPU"])
def test_a_step_takes_the_same_time_by_every_plan(job: str, on: list[str]) -> None:
    step_s = profiled(job, *on)["step_s"]
    one = json.loads(run("plan", job, *on, "--devices", "1", "-o", "one.json", "--json").stdout)
    assert one["plan"]["predicted"]["time_s"] == pytest.approx(step_s, rel=1e-9)
    assert simulated(job, "one.json", *on)["end"] == pytest.approx(step_s, rel=1e-6)
    small = json.loads(run("plan", job, *on, "--memory", "75%", "-o", "small.json", "--json").stdout)["plan"]
    assert small["policy"]
    found = simulated(job, "small.json", *on)
    assert found["end"] == pytest.approx(small["predicted"]["time_s"], rel=1e-6)
    assert found["peak"] == pytest.approx(small["predicted"]["peak_bytes"][0], abs=1)
    # Each of two replicas computes what one device alone does, and waits for the gradients of the other.
    made = outcore.Plan.load("one.json")
    replace(made, replicas=2, policy={}).save("two.json")
    rank = simulated(job, "two.json", "-b", "2", *on)
    assert step_s * 0.95 <= rank["compute"] <= step_s * 1.05 and rank["end"] > rank["compute"]


def simulated(*words: str) -> dict[str, float]:
    """When a step ends, and what rank 0 computes in it."""
    timeline = json.loads(run("simulate", *words, "--json").stdout)
    rows = [dict(zip(timeline["fields"], event, strict=True)) for event in timeline["events"]]
    computing = [row["end_s"] - row["start_s"] for row in rows if row["rank"] == 0 and row["stream"] == "compute"]
    peak = Timeline.from_json(timeline).peak_bytes[0]
    assert Timeline.from_json(timeline).memory[0].bytes[-1] > 1  # weights stay
    return {"end": max(row["end_s"] for row in rows), "compute": sum(computing), "peak": peak}


@pytest.mark.parametrize("job", [LOSS], ids=[""], indirect=True)
def test_a_budget_may_be_a_share_of_it_everywhere(job: str, tmp_path: Path) -> None:
    peak = plain_peak(job)
    verdict = json.loads(run("verify", job, "--json", "--memory", "85%").stdout)
    assert verdict["planned_bytes"] <= 0.85 * peak and verdict["agrees"]
    whole = plain_peak(job, "-b", "2", "--on", "v100")
    for more in ([], ["--grid", "2x1"]):
        plan = json.loads(run("plan", job, "-b", "2", "--machine", "v100x2", *more, "--memory", "97%", "--json").stdout)
        assert plan["memory_bytes"] == int(0.97 * whole) and max(plan["predicted"]["peak_bytes"]) <= 0.97 * whole
    for command in ("plan", "verify"):
        refused = run(command, job, "--memory", "many%", code=1)
        assert "'many%' is no share; write for example 50%" in refused.stderr


def test_functions_take_what_capture_takes_and_say_the_same() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    image = torch.rand(1, 3, 32, 32)
    peaks = {outcore.memory_of(net, args) for args in ((image,), [(1, 3, 32, 32)])}
    assert len(peaks) == 1
    costs = [outcore.estimate(net, (image,)), outcore.estimate(outcore.capture(net, [(1, 3, 32, 32)]))]
    assert costs[0].fingerprint == costs[1].fingerprint and costs[0].calls == costs[1].calls
    outcore.within(net, (image,), memory=None, quiet=True)
    plan = outcore.memory_plan(net)
    outcore.release(net)
    assert peaks == {plan.plain_bytes}
