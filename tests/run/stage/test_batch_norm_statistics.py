"""What batch norms collected travels while gradients do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from outcore.program.plan.document import Plan
from outcore.run.engine.worker import Worker
from outcore.run.stage import batch_norm_statistics
from outcore.run.stage.batch_norm_statistics import RunningStatistics


class TwoAlike:
    """A sum over two copies that hold the same."""

    started: ClassVar[list[torch.Tensor]] = []

    def __init__(self, row: torch.Tensor, group: Any, watched_wait: Any) -> None:
        self.row = row
        self.started.append(row)

    def wait(self) -> None:
        self.row.mul_(2)


def collected(monkeypatch: pytest.MonkeyPatch) -> tuple[RunningStatistics, Any, nn.BatchNorm1d]:
    """Statistics of a stage with two copies, after the forwards of both, which saw the same."""
    monkeypatch.setattr(batch_norm_statistics, "GlooAllReduce", TwoAlike)
    monkeypatch.setattr(TwoAlike, "started", [])
    norm = nn.BatchNorm1d(3)
    plan = Plan("", (("",),), replicas=2)
    statistics = RunningStatistics(plan, {0: 2}, {(0,): None}, None)  # type: ignore[arg-type]
    form: Any = SimpleNamespace(parts={0: nn.Sequential(norm)})
    with statistics.collecting(form, 0, 0, 1):
        norm(torch.arange(12.0).view(4, 3))
    return statistics, form, norm


def test_what_was_started_is_waited_for_and_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, form, norm = collected(monkeypatch)
    statistics.start(form)
    assert len(TwoAlike.started) == 1 and norm.num_batches_tracked == 0
    statistics.update_running(form)
    assert len(TwoAlike.started) == 1 and norm.num_batches_tracked == 2
    late, late_form, other = collected(monkeypatch)
    late.update_running(late_form)  # nothing was reduced in this step: it is sent now
    assert len(TwoAlike.started) == 1 and torch.equal(other.running_mean, norm.running_mean)  # type: ignore[arg-type]


def test_what_is_under_way_outlives_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics, form, _ = collected(monkeypatch)
    statistics.start(form)
    left = statistics.abandon()
    assert [row for row, _ in left] == TwoAlike.started and statistics.abandon() == []


def test_statistics_leave_before_gradients_are_waited_for() -> None:
    done: list[str] = []
    worker: Any = SimpleNamespace(
        place=SimpleNamespace(),
        clock=SimpleNamespace(now=lambda: 0.0),
        gauge=SimpleNamespace(sample=lambda: None),
        record=lambda *event: None,
        _start_statistics=lambda: done.append("statistics"),
        update=SimpleNamespace(finish_reductions=lambda: done.append("waited"), step=lambda: done.append("step")),
    )
    Worker._step(worker, SimpleNamespace(stage=0))  # type: ignore[arg-type]
    assert done == ["statistics", "waited", "step"]
