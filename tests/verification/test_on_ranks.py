"""Plans for several ranks are run, and what does not train as plain PyTorch does is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import outcore
from outcore.cli.main import app
from outcore.errors import PlanError
from outcore.verification import verify_job
from outcore.verification.on_ranks import JobSource, verify_on_ranks

JOB = """
import os
import torch
from torch import nn
import torch.nn.functional as F


def model(dropout=0.0):
    norm = nn.BatchNorm2d(4)
    dropped = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(), *dropped, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )


def batch(size):
    return torch.randn(size, 2, 16, 16), torch.randint(3, (size,))


def loss(output, target):
    return F.cross_entropy(output, target) * (1 + FACTOR * (os.environ.get("WORLD_SIZE", "1") != "1"))


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)
"""


TIED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids):
        return self.head(self.two(self.one(self.emb(ids)).relu()))


def model():
    return Net()


def batch(size):
    return torch.randint(20, (size, 6)), torch.randint(20, (size, 6))


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("FACTOR", "0"))
    return str(path)


def _plan(text: str, arguments: tuple[str, ...] = (), **options: object) -> outcore.Plan:
    graph = outcore.Job.load(text, arguments=arguments).capture(4)
    stages: tuple[tuple[str, ...], ...] = (("",),)
    if options.pop("cut", False):
        blocks = list(graph.root.children)
        stages = tuple(blocks[:3]), tuple(blocks[3:])
    return outcore.Plan(graph.fingerprint, stages, **options)  # type: ignore[arg-type]


def test_a_pipeline_is_run_on_its_ranks_and_is_bitwise_plain_pytorch(job: str) -> None:
    verdict = verify_on_ranks(JobSource(job), _plan(job, cut=True, micro_batches=2), size=4)
    assert verdict.grade == "bitwise equal" and verdict.ranks == 2 and verdict.steps == 2
    assert len(verdict.rows) == 8 and verdict.buffers == 3
    assert verdict.explained.startswith(
        "trained on 2 ranks of this machine, and by plain PyTorch over the same 2 micro"
    )


@pytest.mark.slow
def test_ranks_that_each_stream_a_part_are_compared_too(job: str) -> None:
    tiles = {"grid": [1, 2], "tile": 6}
    verdict = verify_on_ranks(JobSource(job), _plan(job, spatial=tiles, exactness="reassociated"), size=2)
    assert verdict.agrees and max(row.largest for row in verdict.rows) > 0  # other sums: the tiles were run


@pytest.mark.slow
def test_random_numbers_are_compared_with_the_engine_on_one_rank(job: str) -> None:
    arguments = ("dropout=0.5",)
    plan = _plan(job, arguments, cut=True, micro_batches=2)
    verdict = verify_on_ranks(JobSource(job, arguments=arguments), plan, size=4)
    assert verdict.grade == "bitwise equal" and "the engine on one rank" in verdict.explained


def test_what_trains_something_else_is_told(job: str, tmp_path: Path) -> None:
    Path(job).write_text(JOB.replace("FACTOR", "0.001"))
    plan = _plan(job, replicas=2)
    plan.save(tmp_path / "plan.json")
    found = CliRunner().invoke(app, ["verify", job, str(tmp_path / "plan.json"), "--batch", "4"])
    assert found.exit_code == 1 and "verdict: different" in found.output


def test_plans_of_ranks_are_not_verified_as_if_they_were_of_one_device(job: str) -> None:
    plan = _plan(job, replicas=2)
    with pytest.raises(PlanError, match="outcore verify JOB PLAN"):
        verify_job(outcore.Job.load(job), plan=plan, size=4)
    many = _plan(job, replicas=32)
    with pytest.raises(PlanError, match=r"32 ranks.*at most 16.*--devices 16"):
        verify_on_ranks(JobSource(job), many, size=32)


@pytest.mark.slow
def test_weights_that_stages_share_and_weights_that_nothing_uses(tmp_path: Path) -> None:
    path = tmp_path / "tied.py"
    path.write_text(TIED)
    for options in ({"schedule": "1f1b", "micro_batches": 2}, {"schedule": "gems", "batches": 2}):
        graph = outcore.Job.load(str(path)).capture(4)
        plan = outcore.Plan(graph.fingerprint, (("emb", "one"), ("two", "head")), **options)  # type: ignore[arg-type]
        verdict = verify_on_ranks(JobSource(str(path)), plan, size=4)
        assert verdict.agrees and {row.name for row in verdict.rows} == {"emb.weight", "one.weight", "two.weight"}
