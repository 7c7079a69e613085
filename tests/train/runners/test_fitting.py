"""`outcore plan` and `outcore train` go up one ladder: the same rung, the same figures, the same refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.cli.one_device import plan_on_one_device
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.cost.profile import loss_bytes_of_job, profile
from outcore.data import ArraySource, Batch
from outcore.errors import PlanError, TrainError
from outcore.job import Job
from outcore.machine import known
from outcore.machine.units import format_bytes
from outcore.program.plan.document import Plan
from outcore.stream.one_device import simulate_tiles
from outcore.train.examples.feed import MicroBatch
from outcore.train.run_folder.folder import RunFolder
from outcore.train.runners.fitting import FittedModel, fit
from outcore.train.settings.config import Config
from outcore.train.start import RunForecast, forecast


def classifier() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b, stride in ((3, 8, 1), (8, 8, 2), (8, 16, 1), (16, 16, 2)):
        layers += [nn.Conv2d(a, b, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1))


SIDE = 160
JOBS = {
    "classes": Job(classifier, lambda n: (torch.rand(n, 3, SIDE, SIDE), torch.zeros(n).long()), size=1),
    "pixels": Job(segmenter, lambda n: (torch.rand(n, 3, SIDE, SIDE), torch.zeros(n, SIDE, SIDE).long()), size=1),
}


def trained(job: Job, budget: int, folder: Path, *, lazy: bool = True) -> tuple[FittedModel, RunForecast]:
    """A run on a slide, which tiles read lazily, or on batches that the job makes."""
    config = Config.read({"job": "job.py"}, [f"plan.memory={budget}", "train.device=cpu"])
    inputs, target = job.batch(1)
    expected = forecast(job, torch.empty(1, 3, SIDE, SIDE), config, target)
    first = MicroBatch(Batch((ArraySource(inputs[0]),)) if lazy else inputs, target, ("one",))
    return fit(job.build().train(), job, config, expected, first, RunFolder(folder)), expected


def rung(plan: Plan) -> str:
    return "tiles" if plan.stream is not None else "policies" if plan.policy else "plain"


SAID = {"budget": "plain", "within": "policies", "streamed": "tiles"}


@pytest.mark.parametrize(("name", "share"), [("classes", 1.5), ("classes", 0.3), ("pixels", 0.9)])
def test_a_plan_and_a_run_choose_the_same_and_say_the_same(name: str, share: float, tmp_path: Path) -> None:
    job = JOBS[name]
    plain = outcore.plan(job, devices=1, memory="1GiB").predicted
    assert plain is not None
    budget = int(share * plain.peak_bytes[0])
    plan = outcore.plan(job, devices=1, memory=budget)
    assert rung(plan) == {1.5: "plain", 0.9: "policies"}.get(share, "tiles")
    made, _ = trained(job, budget, tmp_path)
    assert SAID[made.decisions[-1][0]] == rung(plan)
    assert plan.predicted is not None
    assert made.step_s == plan.predicted.time_s
    assert made.peak_bytes == max(plan.predicted.peak_bytes) <= budget
    if made.plan is not None:
        assert made.plan.stream == plan.stream


def test_images_that_a_job_makes_lie_on_the_device_and_are_in_the_budget(tmp_path: Path) -> None:
    job, image_bytes = JOBS["classes"], 3 * SIDE**2 * 4
    for name in ("lazy", "tensors", "refused"):
        (tmp_path / name).mkdir()
    lazy, _ = trained(job, 1_000_000, tmp_path / "lazy")
    made, _ = trained(job, 1_000_000 + image_bytes, tmp_path / "tensors", lazy=False)
    assert lazy.plan is not None and made.plan is not None and made.plan.stream == lazy.plan.stream
    assert lazy.peak_bytes is not None and made.peak_bytes == lazy.peak_bytes + image_bytes
    with pytest.raises(TrainError, match="policies and tiles need at least"):
        trained(job, image_bytes, tmp_path / "refused", lazy=False)


def test_the_command_prints_the_same_plan_and_its_timeline_takes_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, budget, here = JOBS["classes"], 1_400_000, known()
    made, graph = outcore.plan(job, devices=1, memory=budget), job.capture()
    options = {"batch": None, "output": None, "svg": None}
    plan_on_one_device(job, graph, here, budget, json=True, **options)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["plan"] == made.to_json()
    plan_on_one_device(job, graph, here, budget, json=False, **options)  # type: ignore[arg-type]
    assert "in tiles: " in capsys.readouterr().out
    costs, optimizer = estimate(graph, here), OptimizerCost.of(2.0, "cpu")
    held = loss_bytes_of_job(job, graph, costs, here.devices[0], optimizer)
    plain_s = profile(job, here.devices[0]).step.step_s
    timeline = simulate_tiles(made, graph, costs, here, optimizer=optimizer, loss_bytes=held, plain_s=plain_s)
    assert made.predicted is not None
    assert timeline.step_s == pytest.approx(made.predicted.time_s, rel=1e-12)
    assert timeline.peak_bytes == made.predicted.peak_bytes


def test_a_refusal_is_the_same_and_the_least_budget_that_it_names_is_enough(tmp_path: Path) -> None:
    job = JOBS["classes"]
    said = r"cannot be done within [^;]+; [^;]+; nor in tiles: .*; give memory=\"\d+KiB\" or more$"
    with pytest.raises(PlanError, match=said) as refused:
        outcore.plan(job, devices=1, memory=100_000)
    with pytest.raises(TrainError) as same:
        trained(job, 100_000, tmp_path)
    least = refused.value.least_bytes
    assert least is not None and f"need at least {format_bytes(least)}" in str(same.value)
    found = outcore.plan(job, devices=1, memory=least).predicted
    assert found is not None and max(found.peak_bytes) <= least


def normalizing() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


def test_a_refusal_names_the_setting_with_which_further_passes_would_fit(tmp_path: Path) -> None:
    job = Job(normalizing, lambda n: (torch.rand(n, 3, SIDE, SIDE), torch.zeros(n).long()), size=1)
    with pytest.raises(TrainError, match=r"give --memory \w+ or more$") as refused:
        trained(job, 100_000, tmp_path)
    plain = outcore.plan(job, devices=1, memory="1GiB").predicted
    assert plain is not None and "plan.statistics" not in str(refused.value)  # nothing fits there
    with pytest.raises(TrainError, match=r"or more, or plan\.statistics=true, for \d+ forward passes over the image"):
        trained(job, int(0.45 * max(plain.peak_bytes)), tmp_path)
