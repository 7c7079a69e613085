"""Policies under a budget: the search against brute force, and the frontier it gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.plan import frontier
from outcore.planner.memory.search import fit, smallest
from outcore.program.policies import KEEP, RECOMPUTE


def step(layers: int = 4) -> StepModel:
    torch.manual_seed(0)
    body = [
        m for i in range(layers) for m in (nn.Conv2d(4 + i % 2, 5 - i % 2, 3), nn.BatchNorm2d(5 - i % 2), nn.ReLU())
    ]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1))
    graph = outcore.capture(net, [(2, 4, 64, 64)])
    return StepModel(graph, by_bytes(account(graph), 1e9), 0.0, None, 1e9)


def brute_force(keeping: StepModel, budget: int) -> float:
    """The fastest step within a budget, over all assignments."""
    choices = {b.name: [KEEP, *c] for b in keeping.buffers.values() if b.bytes > 1000 and (c := keeping.choices(b))}
    best = float("inf")
    for picked in itertools.product(*choices.values()):
        outcome = keeping.evaluate(dict(zip(choices, picked, strict=True)))
        if outcome.peak_bytes <= budget:
            best = min(best, outcome.time_s)
    return best


def test_the_search_is_close_to_the_best_there_is() -> None:
    keeping = step(3)
    least, plain = smallest(keeping).outcome.peak_bytes, keeping.plain.peak_bytes
    for k in range(1, 8):
        budget = least + (plain - least) * k // 8
        best, found = brute_force(keeping, budget), fit(keeping, budget)
        assert found.fits(budget)
        extra, least_extra = found.outcome.time_s - keeping.plain_s, best - keeping.plain_s
        print(f"budget {budget}: extra {extra:.6f} s, best {least_extra:.6f} s")
        assert found.outcome.time_s <= 1.02 * best


def test_less_memory_never_takes_less_time() -> None:
    found = frontier(step(6), points=5, search_s=0.5)
    assert len(found) >= 3
    for one, other in itertools.pairwise(found):
        assert one.outcome.peak_bytes > other.outcome.peak_bytes
        assert one.outcome.time_s < other.outcome.time_s or one is found[0]


def test_plain_training_is_kept_where_it_fits() -> None:
    keeping = step(3)
    assert not keeping.resolved(fit(keeping, keeping.plain.peak_bytes).policy)


def test_keeping_everything_is_the_plain_step() -> None:
    keeping = step(4)
    outcome = keeping.evaluate({})
    assert outcome.time_s == keeping.plain_s and outcome.peak_bytes == keeping.plain.peak_bytes


def test_nothing_goes_below_what_one_operation_needs() -> None:
    keeping = step(3)
    floor, at = keeping.floor
    choices = {b.name: [KEEP, *c] for b in keeping.buffers.values() if b.bytes > 1000 and (c := keeping.choices(b))}
    assignments = (dict(zip(choices, picked, strict=True)) for picked in itertools.product(*choices.values()))
    least = min(keeping.evaluate(policy).peak_bytes for policy in assignments)
    moment = keeping.plain.moments[at]
    print(f"floor {floor}, least {least}, {moment.phase} of {moment.call}")
    assert 0.7 * least <= floor <= least
    assert floor < keeping.plain.peak_bytes


@pytest.mark.parametrize("rate", [1e7, 4e8, 1.5e9, 5e9])
def test_a_slower_memory_below_makes_nothing_impossible(rate: float) -> None:
    layers: list[nn.Module] = []
    for a, b, stride in [(3, 8, 1), (8, 8, 2), (8, 16, 1), (16, 16, 2), (16, 16, 1)]:
        layers += [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    graph = outcore.capture(
        nn.Sequential(*layers).double().eval(), (torch.empty(1, 3, 256, 267, dtype=torch.float64, device="meta"),)
    )
    costs = by_bytes(account(graph), 1e10)
    still = smallest(StepModel(graph, costs, 0.0, None))
    moving = StepModel(graph, costs, 0.0, OffloadTarget(rate, 2 * rate, least_bytes=2**16))
    assert fit(moving, still.outcome.peak_bytes).fits(still.outcome.peak_bytes)


def test_what_is_drawn_is_not_made_again_where_a_generator_cannot_go_back() -> None:
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5))]
    graph = outcore.capture(nn.Sequential(*layers).train(), [(64, 32)])
    costs = by_bytes(account(graph), 1e9)
    free, bound = (StepModel(graph, costs, 0.0, None, 1e9, draws=draws) for draws in (True, False))
    drawn = {n for n, b in free.buffers.items() if b.drawn and RECOMPUTE in free.choices(b)}
    assert drawn and all(RECOMPUTE not in bound.choices(bound.buffers[n]) for n in drawn)
    chosen = bound.resolved(smallest(bound).policy)
    assert RECOMPUTE in chosen.values() and all(chosen.get(n) != RECOMPUTE for n in drawn)
