"""What of a call's time a part of the batch takes too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.fixed_times import with_fixed_times
from outcore.cost.predicted.estimate import estimate
from outcore.errors import OutcoreError
from outcore.machine import parse
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
    with pytest.raises(OutcoreError, match="not called"):
        with_fixed_times(one, replace(part, calls={}), 1 / 8)
    with pytest.raises(OutcoreError, match="between 0 and 1"):
        with_fixed_times(one, part, 1.0)
