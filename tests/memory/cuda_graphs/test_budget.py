"""Graphs that take more than the budget are planned again, with graphs that only say what they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.cuda_graphs import budget as graph_budget
from outcore.memory.saved_tensors.managed_forward import ManagedForward

MIB = 2**20


class Recorded:
    """Takes what its plan says, and some more."""

    def __init__(self, more: int) -> None:
        self.more, self.graphs, self.bytes, self.freed = more, None, 0, False

    def capture(self, tensors: list[torch.Tensor], *, warm: bool) -> None:
        self.bytes = self.more

    def free(self) -> None:
        self.freed = True


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ManagedForward, Any, torch.Tensor]]:
    """A model within half of its memory, as if it were on a GPU."""
    monkeypatch.setattr(graph_budget, "_unused", lambda: 0)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)]
    model, images = nn.Sequential(*layers), torch.randn(4096, 64)
    outcore.within(model, (images,), memory=None, optimizer=0.0, measure_s=0.5, quiet=True)
    plan = outcore.memory_plan(model)
    budget = int(0.6 * plan.plain_bytes)
    outcore.within(model, (images,), memory=budget, optimizer=0.0, costs=plan.keeping.costs, quiet=True)
    managed_forward = model.__dict__["forward"]
    (key,) = managed_forward.admitted
    yield managed_forward, key, images  # which does not hold the model
    outcore.release(model)
    if managed_forward.tier is not None:
        managed_forward.tier.close()


def again(managed_forward: ManagedForward, key: Any, images: torch.Tensor, active: int) -> tuple[bool, Any]:
    """Let the graphs take so much in all."""
    entry = managed_forward.admitted[key]
    assert entry is not None
    entry.graphed = None
    recorded = Recorded(active - graph_budget._beside(managed_forward, entry, [images]))
    entry.graphed = recorded  # type: ignore[assignment]
    return graph_budget.planned_again(managed_forward, key, entry, [images], (images,), {}), recorded


def test_graphs_within_the_budget_stay(managed: Any) -> None:
    managed_forward, key, images = managed
    plan = managed_forward.plan
    changed, recorded = again(managed_forward, key, images, managed_forward.settings.budget_bytes)
    assert not changed and not recorded.freed and managed_forward.plan is plan


def test_graphs_above_the_budget_are_planned_again_with_as_much_less(managed: Any) -> None:
    managed_forward, key, images = managed
    before, peak = managed_forward.settings, managed_forward.plan.outcome.peak_bytes
    changed, recorded = again(managed_forward, key, images, before.budget_bytes + MIB)
    assert changed and recorded.freed
    assert managed_forward.settings.reserved_bytes == before.reserved_bytes + MIB
    assert managed_forward.plan.outcome.peak_bytes <= before.budget_bytes - before.reserved_bytes - MIB < peak


def test_the_smallest_plan_has_its_turn_before_graphs_are_given_up(managed: Any) -> None:
    managed_forward, key, images = managed
    peak = managed_forward.plan.outcome.peak_bytes
    changed, _ = again(managed_forward, key, images, 4 * managed_forward.settings.budget_bytes)
    assert changed and managed_forward.plan.outcome.peak_bytes < peak
    with pytest.warns(UserWarning, match="call by call; give memory="):
        changed, recorded = again(managed_forward, key, images, 4 * managed_forward.settings.budget_bytes)
    assert not changed and recorded.freed
    assert managed_forward.admitted[key].graphed is None
    managed_forward.model(images).sum().backward()


def test_a_step_that_cannot_be_recorded_runs_call_by_call(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    managed_forward, key, images = managed

    def fail(*_: Any, warm: bool) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorded, "capture", fail)
    with pytest.warns(UserWarning, match="not permitted"):
        changed, _ = again(managed_forward, key, images, 0)
    assert not changed and managed_forward.admitted[key].graphed is None
