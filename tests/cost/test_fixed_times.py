"""What of a call's time a part of the batch takes too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs, parts_of, with_fixed_times
from outcore.cost.predicted.estimate import estimate
from outcore.errors import MachineError, OutcoreError
from outcore.machine import known, parse
from outcore.machine.clock import TimedRuns
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import weigh
from outcore.planner.pipeline.call_weights import CallWeights

MODEL = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def timed(size: int, forward_s: float, backward_s: float) -> Costs:
    """Costs of a batch in which every call takes so long."""
    known = estimate(outcore.capture(MODEL, (torch.zeros(size, 8),)), parse("h200"))
    runs = {"forward": TimedRuns.of([forward_s]), "backward": TimedRuns.of([backward_s])}
    return replace(known, calls={name: replace(row, **runs) for name, row in known.calls.items()}, between_s=0.0)


def test_a_line_through_both_gives_the_part_and_the_whole_back() -> None:
    costs = with_fixed_times(timed(32, 0.8, 1.6), timed(4, 0.2, 0.3), 1 / 8)
    graph = outcore.capture(MODEL, (torch.zeros(32, 8),))
    assert costs["0#0"].fixed_forward_s == pytest.approx((0.2 - 0.1) / (7 / 8))
    weights = CallWeights.of(graph, costs)
    units = weigh(graph, weights, find_units(graph, weights, "layer"))
    part = units.scaled(1 / 8)
    assert part.forward_s == pytest.approx([0.2] * len(units)) and part.backward_s == pytest.approx([0.3] * len(units))
    assert units.scaled(1.0).forward_s == pytest.approx([0.8] * len(units))


def test_a_part_is_at_least_its_share_and_at_most_the_whole() -> None:
    faster = with_fixed_times(timed(32, 0.8, 1.6), timed(4, 0.05, 2.0), 1 / 8)
    assert faster["0#0"].fixed_forward_s == 0.0 and faster["0#0"].fixed_backward_s == pytest.approx(1.6)


def test_fixed_times_are_saved_with_the_costs() -> None:
    costs = with_fixed_times(timed(32, 0.8, 1.6), timed(4, 0.2, 0.3), 1 / 8)
    assert Costs.from_json(costs.to_json()).calls == costs.calls


def test_another_network_and_no_fraction_are_refused() -> None:
    one, part = timed(32, 0.8, 1.6), timed(4, 0.2, 0.3)
    with pytest.raises(OutcoreError, match="is called with the whole batch or with a part"):
        with_fixed_times(one, replace(part, calls={}), 1 / 8)
    with pytest.raises(OutcoreError, match="between 0 and 1"):
        with_fixed_times(one, part, 1.0)


def test_a_part_is_a_divisor_and_an_eighth_if_there_is_one() -> None:
    for batch in range(1, 200):
        sizes = parts_of(batch)
        assert all(batch % size == 0 and 0 < size < batch for size in sizes) and len(sizes) <= 2
        assert bool(sizes) == (batch > 1)
        if batch % 8 == 0:
            assert sizes[0] == batch // 8


def test_a_part_is_known_by_the_means_of_the_whole() -> None:
    """By estimate: what the line says of an eighth is the estimate of an eighth, where that is between its bounds."""
    graph, machine = outcore.capture(MODEL, (torch.zeros(32, 8),)), parse("h200")
    costs = batch_costs(graph, machine)
    plain = estimate(graph, machine)
    part = estimate(outcore.capture(MODEL, (torch.zeros(4, 8),)), machine)
    for name, row in costs.calls.items():
        assert replace(row, fixed_forward_s=0.0, fixed_backward_s=0.0) == plain.calls[name]
        assert row.forward is not None and row.fixed_forward_s > 0
        line_s = row.fixed_forward_s + (row.forward.median_s - row.fixed_forward_s) / 8
        assert line_s == pytest.approx(min(part.calls[name].forward.median_s, row.forward.median_s))  # type: ignore[union-attr]


def test_calls_of_a_batch_and_of_a_part_are_measured_here_and_nowhere_else() -> None:
    here = known()
    graph = outcore.capture(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.zeros(16, 64),))
    costs = batch_costs(graph, here, measure_s=2.0)
    assert costs["0#0"].time_source == "measured" and costs["0#0"].fixed_forward_s >= 0
    with pytest.raises(MachineError, match="cannot be measured on"):
        batch_costs(graph, parse("v100"), measure_s=2.0)
    with pytest.raises(MachineError, match="some seconds"):
        batch_costs(graph, here, measure_s=0.0)


class Odd(nn.Module):
    """Python that depends on the size of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if self.kind == "rows" and count % 4:
            raise RuntimeError("shape '[4, -1]' is invalid")
        if self.kind == "loop":
            x = torch.cat([self.first(part) for part in x.split(3)])
        if self.kind == "branch" and count > 5:
            x = self.first(x).relu()
        if self.kind == "normed":
            x = nn.functional.batch_norm(x, None, None, training=True)
        if self.kind == "exit" and count < 3:
            raise KeyError("a lookup that small batches miss")
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", ["plain", "rows", "loop", "branch", "normed", "exit"])
def test_odd_batches_and_networks_are_planned_with_or_without(kind: str) -> None:
    """No batch that can be recorded fails for the sake of a part of it that cannot."""
    planned = 0
    for batch in (1, 2, 3, 4, 7, 8, 12, 13, 30, 32):
        job = outcore.Job(
            model=lambda: Odd(kind),
            batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
            loss=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            size=batch,
        )
        try:
            graph = job.capture()
        except OutcoreError:  # what the user asked for cannot be run either
            continue
        costs = batch_costs(graph, parse("2xv100"))
        assert costs.calls.keys() == graph.calls.keys()
        assert any(row.fixed_forward_s for row in costs.calls.values()) <= (batch > 1)
        made = outcore.plan(job, devices=2, machine="2xv100", batch=batch)
        assert made.predicted is not None and made.predicted.time_s > 0
        planned += 1
    assert planned >= (4 if kind == "rows" else 7)
