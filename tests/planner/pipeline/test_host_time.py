"""A stage on a GPU is never faster than the host that launches it: plans of several devices take what a step takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.profile import profile
from outcore.machine import parse


def job(width: int, side: int) -> outcore.Job:
    layers = [m for _ in range(12) for m in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return outcore.Job(
        model=lambda: nn.Sequential(*layers), batch=lambda n: (torch.rand(n, width, side, side), None), size=1
    )


@pytest.mark.parametrize(("width", "side"), [(4, 16), (64, 256)], ids=["bound by the host", "bound by the device"])
def test_data_parallel_takes_what_a_step_on_one_device_takes(width: int, side: int) -> None:
    made = job(width, side)
    alone = profile(made, parse("v100").devices[0]).step
    expected_s = alone.step_s - alone.optimizer_s
    plan = outcore.plan(made, devices=4, machine="v100x4")
    assert plan.replicas == 4 and plan.predicted is not None
    assert plan.predicted.time_s == pytest.approx(expected_s, rel=0.15)


def test_no_schedule_is_faster_than_its_hosts() -> None:
    made = job(4, 16)
    alone = profile(made, parse("v100").devices[0]).step
    for schedule in ("model_parallel", "gpipe", "1f1b"):
        plan = outcore.plan(made, devices=2, machine="v100x2", batch=8, schedule=schedule)  # type: ignore[arg-type]
        assert plan.predicted is not None
        launches = plan.micro_batches / len(plan.stages)
        assert plan.predicted.time_s >= 0.85 * launches * (alone.step_s - alone.optimizer_s)
