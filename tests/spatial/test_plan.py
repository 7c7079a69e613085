"""Plans of grids: which, and what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.machine import parse
from outcore.machine.link import Link
from outcore.spatial.plan import plan_grid


def _graph(pixels: int = 256, head: bool = False) -> outcore.Graph:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    more = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)] if head else []
    return outcore.capture(nn.Sequential(*layers, *more), torch.randn(1, 3, pixels, pixels))


def test_the_plan_names_grid_peaks_and_the_runners_up() -> None:
    plan = plan_grid(_graph(), devices=4, machine="v100x4")
    assert plan.ranks == 4 and plan.predicted is not None and len(plan.predicted.peak_bytes) == 4
    assert outcore.Plan.from_json(plan.to_json()) == plan
    assert "halo exchanges" in str(plan) and any("x 4" in line or "4 x" in line for line in plan.why)


def test_what_follows_the_image_is_a_stage_of_its_own() -> None:
    plan = plan_grid(_graph(head=True), (2, 2), machine="v100x4")
    assert len(plan.stages) == 2 and plan.placement == (0, 0) and plan.ranks == 4
    plan.validate(_graph(head=True), ranks=4)


def test_a_loss_over_pixels_leaves_nothing_to_gather() -> None:
    def job(loss: object) -> outcore.Job:
        def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randn(size, 3, 64, 64), torch.randn(size, 4, 64, 64)

        return outcore.Job(model=lambda: nn.Conv2d(3, 4, 3, padding=1), batch=batch, loss=loss, size=1)  # type: ignore[arg-type]

    def squeezed(loss: object) -> outcore.Job:
        net = nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), nn.Flatten(1, 2))
        batch = job(loss).batch
        return outcore.Job(model=lambda: net, batch=lambda n: (batch(n)[0], batch(n)[0][:, 0]), loss=loss, size=1)  # type: ignore[arg-type]

    assert (plan_grid(squeezed(nn.MSELoss()), (2, 1), machine="v100x2").spatial or {}).get("loss") is None
    parts = plan_grid(job(nn.MSELoss()), (2, 2), machine="v100x4")
    whole = plan_grid(job(lambda out, target: (out - target).square().mean()), (2, 2), machine="v100x4")
    assert parts.spatial == {"grid": [2, 2], "loss": "parts"} and whole.spatial == {"grid": [2, 2]}
    assert parts.predicted is not None and whole.predicted is not None
    assert parts.predicted.time_s < whole.predicted.time_s
    assert parts.predicted.peak_bytes[0] < 0.5 * whole.predicted.peak_bytes[0]


def test_a_slow_link_has_halos_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.spatial.script.POSTING_S", 0.0)
    slow = replace(parse("v100x4"), between_devices=Link.symmetric(bandwidth_bytes_per_s=1e9, latency_s=0.5))
    fast = replace(slow, between_devices=Link.symmetric(bandwidth_bytes_per_s=1e18))
    assert plan_grid(_graph(), (2, 2), machine=slow).spatial["twice"]  # type: ignore[index]
    assert "twice" not in plan_grid(_graph(), (2, 2), machine=fast).spatial  # type: ignore[operator]


def test_a_budget_that_no_grid_meets_is_refused_with_the_least() -> None:
    with pytest.raises(PlanError, match=r"it takes .* on every rank"):
        plan_grid(_graph(), (2, 2), machine="v100x4", memory=1000)


def test_a_network_that_needs_all_of_its_image_is_refused() -> None:
    graph = outcore.capture(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), torch.randn(1, 3, 4, 4))
    with pytest.raises(PlanError, match="can be split"):
        plan_grid(graph, (2, 2), machine="v100x4")


def test_a_plan_is_made_for_a_job_or_a_graph() -> None:
    with pytest.raises(PlanError, match=r"not for Linear; outcore.capture\(model, inputs\) records a graph"):
        outcore.plan(torch.nn.Linear(2, 2), devices=2)  # type: ignore[arg-type]
