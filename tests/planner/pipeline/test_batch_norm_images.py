"""What batch norms see under a plan, and that a plan which changes it is never taken for nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine import parse
from outcore.planner import CallWeights
from outcore.planner import plan as search
from outcore.planner.pipeline.batch_norm_images import batch_norms, norms_see, own_norms
from outcore.program.plan.document import BatchNorm, Plan


def normed(batch: int = 8) -> Graph:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)
        )
        return outcore.capture(model, torch.empty(batch, 3, 32, 32))


def test_of_plans_that_take_the_same_time_the_one_whose_norms_see_most_is_taken() -> None:
    made = outcore.plan(normed(), devices=2, machine="2xv100", memory="1GiB")
    assert (made.replicas, made.micro_batches * made.batches) == (2, 1)
    assert made.why[0] == "batch norms see 4 of 8 images"


def test_without_norms_fewer_pieces_are_taken() -> None:
    with torch.device("meta"):
        graph = outcore.capture(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(8, 64))
    made = outcore.plan(graph, devices=1, schedule="model_parallel", machine="v100")
    assert made.batches == made.micro_batches == 1 and not any("batch norms" in line for line in made.why)


def test_synchronised_norms_see_all_and_refuse_micro_batches() -> None:
    graph = normed()
    made = outcore.plan(graph, devices=2, machine="2xv100", batch_norm="synchronised")
    assert made.batch_norm == "synchronised" and made.micro_batches * made.batches == 1
    assert norms_see(made, graph) == "batch norms see 8 of 8 images"
    weights = CallWeights.of(graph, outcore.estimate(graph, parse("v100")))
    with pytest.raises(PlanError, match="batch norms that see all of it"):
        search(graph, weights, devices=2, schedule="1f1b", batch_norm="synchronised")


def test_norms_in_eval_mode_look_at_no_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.BatchNorm2d(4))
    graph = outcore.capture(model, torch.zeros(2, 3, 8, 8))
    assert batch_norms(graph) == ["2#0"]
    assert norms_see(Plan(graph.fingerprint, (("",),), replicas=2), graph) == "batch norms see 1 of 2 images"


class CalledAsFunction(nn.Module):
    """Its batch norm is no module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(self.conv(x), None, None, training=True)


@pytest.mark.parametrize("mode", ["deferred", "synchronised"])
def test_batch_norms_that_are_no_modules_are_refused_when_the_plan_is_made(mode: BatchNorm) -> None:
    graph = outcore.capture(CalledAsFunction(), torch.randn(4, 2, 8, 8))
    with pytest.raises(PlanError, match=f"batch_norm={mode}.*batch_norm.*#0"):
        outcore.plan(graph, devices=2, machine="2xv100", batch_norm=mode)
    assert own_norms(graph) and outcore.plan(graph, devices=2, machine="2xv100").ranks == 2
