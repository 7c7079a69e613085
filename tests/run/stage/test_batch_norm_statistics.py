"""What batch norms collected travels while gradients do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import PlanError
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


class OwnNorm(nn.BatchNorm1d):
    """A batch norm with a forward of its own, as those of a Keras model's twin have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.1, self.eps)


@pytest.mark.parametrize("mode", ["deferred", "synchronised"])
def test_norms_that_are_no_modules_of_torchs_are_refused_where_they_would_see_a_part_of_the_batch(mode: Any) -> None:
    """They were run as ever, each on its own part, whatever the plan said."""
    for net, refused in ((OwnNorm(4), True), (OwnNorm(4).eval(), False), (nn.BatchNorm1d(4), False)):
        model = nn.Sequential(nn.Linear(3, 4), net, nn.Linear(4, 2))
        model.train()
        net.train(refused or type(net) is nn.BatchNorm1d)
        x, y = torch.randn(4, 3), torch.randn(4, 2)
        graph = outcore.capture(model, (x,))
        plan = outcore.Plan(graph.fingerprint, [["0", "1", "2"]], batch_norm=mode)
        engine = outcore.Engine(
            model, plan, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=x, device="cpu"
        )
        before = [p.detach().clone() for p in model.parameters()]
        if not refused:
            engine.step(x, y)
            continue
        with pytest.raises(Exception, match=f"plan.batch_norm={mode} is known for torch's own") as found:
            engine.step(x, y)
        assert isinstance(found.value, PlanError) or isinstance(found.value.__cause__, PlanError)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
