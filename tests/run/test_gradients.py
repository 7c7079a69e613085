"""Gradients, losses and weights of every way to run, against plain PyTorch over the same micro-batches."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.foreign.sample import one_in
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import alone, difference, plain, train

BOUND = 1e-10


def compare(results: list[dict[str, Any]], oracle: dict[str, Any]) -> None:
    """Every rank has the oracle's loss, and its own stages the oracle's gradients and weights."""
    seen: set[str] = set()
    for result in results:
        assert result["losses"] == pytest.approx(oracle["losses"], rel=BOUND)
        assert result["losses"] == results[0]["losses"]
        assert result["evaluated"] == pytest.approx(oracle["evaluated"], rel=1e-9)
        assert difference(result["gradients"], oracle["gradients"]) < BOUND
        weights = {n: t for n, t in result["weights"].items() if t.is_floating_point()}
        assert difference(weights, oracle["weights"]) < 1e-9
        for name, tensor in result["weights"].items():
            assert tensor.is_floating_point() or torch.equal(tensor, oracle["weights"][name]), name
        seen |= set(result["weights"])
    assert seen == set(oracle["weights"])
    for a in results:
        for b in results:
            assert all(torch.equal(t, b["weights"][n]) for n, t in a["weights"].items() if n in b["weights"])


@pytest.mark.parametrize("case", ["unet", "unet-bn", "resnet", "inception", "densenet", "indices"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_one_rank_is_bitwise_plain_pytorch(case: str, pieces: int) -> None:
    got, oracle = alone(case, pieces), plain(case, pieces)
    assert got["losses"] == oracle["losses"]
    assert got["gradients"].keys() == oracle["gradients"].keys()
    for name, gradient in oracle["gradients"].items():
        assert torch.equal(got["gradients"][name], gradient), name
    for name, weight in oracle["weights"].items():
        assert torch.equal(got["weights"][name], weight), name
    assert got["evaluated"] == oracle["evaluated"]


SCHEDULES = {
    "model-parallel": {"schedule": "model_parallel", "micro_batches": 2},
    "gpipe": {"schedule": "gpipe", "micro_batches": 4},
    "1f1b": {"schedule": "1f1b", "micro_batches": 4},
    "gems-2": {"schedule": "gems", "batches": 2},
    "gems-4": {"schedule": "gems", "batches": 4},
    "gems-8": {"schedule": "gems", "batches": 4, "micro_batches": 2},
}


def _run(ranks: Pool, case: str, stages: int, schedule: str, replicas: int, steps: int = 3) -> None:
    plan = SCHEDULES[schedule] | {"stages": stages, "replicas": replicas}
    size = 16 if replicas > 1 or schedule == "gems-8" else 8
    pieces = plan.get("micro_batches", 1) * plan.get("batches", 1) * replicas
    oracle = alone if case == "transformer" else plain
    compare(ranks.run(train, stages * replicas, case, plan, steps, size), oracle(case, pieces, steps, size))


@pytest.mark.parametrize(("schedule", "case"), one_in(2, product(SCHEDULES, ["unet", "resnet"])))
def test_two_stages(ranks: Pool, schedule: str, case: str) -> None:
    _run(ranks, case, 2, schedule, 1)


def test_whole_numbers_travel_along_skips(ranks: Pool) -> None:
    for schedule in ("gpipe", "gems-2"):
        _run(ranks, "indices", 2, schedule, 1)


@pytest.mark.parametrize(("schedule", "case"), one_in(2, product(["1f1b", "gems-8"], ["unet-bn", "transformer"])))
def test_two_stages_on_two_replicas(ranks: Pool, schedule: str, case: str) -> None:
    _run(ranks, case, 2, schedule, 2)


FOUR = ["unet", "missing-skips", "inception", "densenet", "transformer"]


@pytest.mark.parametrize(("case", "schedule"), one_in(2, product(FOUR, ["1f1b", "gems-4"])))
def test_four_stages(ranks: Pool, case: str, schedule: str) -> None:
    _run(ranks, case, 4, schedule, 1)


@pytest.mark.parametrize("case", one_in(2, ["unet", "resnet"]))
def test_three_stages_under_gems_share_the_middle_one(ranks: Pool, case: str) -> None:
    _run(ranks, case, 3, "gems-4", 1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "case", ["unet", "unet-bn", "missing-skips", "resnet", "inception", "densenet", "transformer", "indices"]
)
def test_everything(ranks: Pool, case: str, schedule: str) -> None:
    """Every network under every schedule, alone and with two replicas, weights after twenty steps."""
    for stages, replicas in ((2, 1), (2, 2), (4, 1)):
        if stages in CASES[case].cuts:
            _run(ranks, case, stages, schedule, replicas, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gems-4"])
def test_three_stages_on_two_replicas(ranks: Pool, schedule: str) -> None:
    _run(ranks, "resnet", 3, schedule, 2, steps=20)
