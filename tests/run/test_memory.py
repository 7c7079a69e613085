"""What a rank holds at most, counted, against what the planner says from shapes alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.planner.pipeline.lower import predict_timeline
from outcore.program import Links
from outcore.run import Engine
from tests.foreign.sample import one_in
from tests.planner.shape_weights import weights_from_shapes
from tests.run.networks import CASES, Dense, Residual, UNet, images
from tests.run.pool import Pool
from tests.run.test_gradients import SCHEDULES
from tests.run.training import momentum

SIDE = 40
LARGE = {
    "unet": (UNet, lambda n: images(n, SIDE), F.mse_loss),
    "densenet": (Dense, lambda n: images(n, SIDE), F.mse_loss),
    "resnet": (Residual, lambda n: (images(n, SIDE)[0], torch.randint(3, (n,))), F.cross_entropy),
}


def peaks(case: str, schedule: str) -> tuple[list[int], list[int]]:
    """Measured and planned, by rank."""
    model, batch, loss = LARGE[case]
    job = outcore.Job(model=lambda: model().double(), batch=batch, loss=loss, size=8)
    graph = job.capture()
    options: dict[str, Any] = SCHEDULES[schedule]
    plan = outcore.Plan(graph.fingerprint, CASES[case].cuts[2], **options)
    planned = predict_timeline(plan, graph, weights_from_shapes(graph, state_per_parameter=1.0), Links()).peak_bytes
    engine = Engine(job, plan, optimizer=momentum)
    for _ in range(2):
        engine.count_memory()
        engine.step(*job.batch(8))
    measured = engine.timeline().peak_bytes
    engine.close()
    return list(measured), list(planned)


def heavy_peaks() -> tuple[list[int], list[int]]:
    """Of a job whose memory is parameters, by the plan that is made for it, with the optimizer that it is given."""
    job = outcore.Job(
        model=lambda: nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 400), nn.Linear(400, 5)),
        batch=lambda n: (torch.rand(n, 300), torch.randint(5, (n,))),
        loss=F.cross_entropy,
        size=4,
    )
    plan = outcore.plan(job, devices=2)
    engine = Engine(job, plan, optimizer=torch.optim.AdamW)
    for _ in range(3):
        engine.count_memory()
        engine.step(*job.batch(4))
    measured = engine.timeline().peak_bytes
    engine.close()
    assert plan.predicted is not None
    return list(measured), list(plan.predicted.peak_bytes)


def test_the_workspace_of_the_update_is_planned(ranks: Pool) -> None:
    measured, planned = ranks.run(heavy_peaks, 2)[0]
    assert all(0.8 * p <= m <= 1.02 * p for m, p in zip(measured, planned, strict=True)), (measured, planned)


@pytest.mark.parametrize(("case", "schedule"), one_in(3, product(LARGE, ["gpipe", "1f1b", "gems-4"])))
def test_no_rank_holds_more_than_planned(ranks: Pool, case: str, schedule: str) -> None:
    measured, planned = ranks.run(peaks, 2, case, schedule)[0]
    print(case, schedule, [round(m / p, 3) for m, p in zip(measured, planned, strict=True)])
    assert all(m <= 1.05 * p for m, p in zip(measured, planned, strict=True))


def peaks_in_tiles(head: bool) -> tuple[list[int], list[int]]:
    """Measured and planned, where each of two ranks streams its half of the image."""
    layers = [nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    rest = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)] if head else [nn.Conv2d(8, 2, 3, padding=1)]
    target = (lambda n: torch.randint(3, (n,))) if head else (lambda n: torch.randn(n, 2, 96, 96))
    job = outcore.Job(
        model=lambda: nn.Sequential(*layers, *rest),
        batch=lambda n: (torch.randn(n, 2, 96, 96), target(n)),
        loss=F.cross_entropy if head else nn.MSELoss(),
        size=1,
    )
    roomy = outcore.plan(job, devices=2, batch=1)
    assert roomy.predicted is not None
    plan = outcore.plan(job, devices=2, batch=1, memory=max(roomy.predicted.peak_bytes) // 3)
    assert plan.spatial is not None and "tile" in plan.spatial and plan.predicted is not None
    engine = Engine(job, plan, optimizer=momentum)
    for _ in range(2):
        engine.count_memory()
        engine.step(*job.batch(1))
    measured = engine.timeline().peak_bytes
    engine.close()
    return list(measured), list(plan.predicted.peak_bytes)


@pytest.mark.parametrize("head", [True, False])
def test_no_rank_that_streams_its_part_holds_more_than_planned(ranks: Pool, head: bool) -> None:
    measured, planned = ranks.run(peaks_in_tiles, 2, head)[0]
    print([round(m / p, 3) for m, p in zip(measured, planned, strict=True)])
    assert all(0.6 * p <= m <= 1.05 * p for m, p in zip(measured, planned, strict=True)), (measured, planned)
