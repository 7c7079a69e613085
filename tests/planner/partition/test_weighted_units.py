"""What a part of the batch takes: some of it is the same for every part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.predicted.estimate import estimate
from outcore.machine import parse
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.planner.pipeline.plan_job import weights_on

RATE = 1e9


def units(*, forward_s: float, backward_s: float, fixed_s: float = 0.0, rate: float = RATE) -> WeightedUnits:
    """One layer of a million bytes of parameters beside one without any."""
    graph = outcore.capture(nn.Sequential(nn.Linear(500, 500, bias=False), nn.ReLU()), (torch.zeros(8, 500),))
    linear, relu = graph.calls
    measured = {"fixed_forward_s": fixed_s, "fixed_backward_s": fixed_s}
    one = CallWeight(forward_s, backward_s, parameters=("0.weight",), **measured)
    rows = {linear: one, relu: CallWeight(0.1, 0.1, **measured)}
    weights = CallWeights(rows, {"0.weight": 1_000_000}, parameter_bytes_per_s=rate)
    return weigh(graph, weights, find_units(graph, weights, "layer"))


def test_without_parameters_and_overhead_time_shrinks_with_the_batch() -> None:
    part = units(forward_s=0.2, backward_s=0.4, rate=float("inf")).scaled(0.25, 4)
    assert part.forward_s == pytest.approx((0.05, 0.025)) and part.backward_s == pytest.approx((0.1, 0.025))


def test_parameters_are_read_once_in_forward_and_moved_twice_in_backward_by_every_part() -> None:
    """A millisecond each time; gradients of all parts but the first are added, which moves them three times."""
    part = units(forward_s=0.009, backward_s=0.010).scaled(0.25, 4)
    assert part.forward_s[0] == pytest.approx(0.001 + 0.008 / 4)
    assert part.backward_s[0] == pytest.approx(0.002 + 0.008 / 4 + 0.75 * 0.003)
    alone = units(forward_s=0.009, backward_s=0.010).scaled(0.25)  # of replicas: nothing is added
    assert alone.backward_s[0] == pytest.approx(0.002 + 0.008 / 4)


def test_a_part_never_takes_more_than_the_whole_but_for_adding() -> None:
    whole = units(forward_s=0.0005, backward_s=0.001)
    part = whole.scaled(0.5, 2)
    assert part.forward_s[0] == pytest.approx(whole.forward_s[0])
    assert part.backward_s[0] == pytest.approx(whole.backward_s[0] + 0.5 * 0.003)


def test_what_was_measured_of_a_part_counts_in_either_direction_and_in_place_of_parameters() -> None:
    part = units(forward_s=0.2, backward_s=0.4, fixed_s=0.01).scaled(0.5, 2)
    adding = 0.5 * 0.003
    assert part.backward_s[0] == pytest.approx(0.01 + 0.39 / 2 + adding)
    part = units(forward_s=0.2, backward_s=0.4, fixed_s=0.01, rate=float("inf")).scaled(0.5, 2)
    assert part.forward_s[0] == pytest.approx(0.01 + 0.19 / 2) and part.backward_s[0] == pytest.approx(0.01 + 0.39 / 2)


def test_the_whole_batch_takes_what_was_measured() -> None:
    whole = units(forward_s=0.2, backward_s=0.4, fixed_s=0.01)
    assert whole.scaled(1.0) is whole


def test_rates_of_a_machine_count() -> None:
    """On a slow memory more micro-batches are predicted to take longer, on a fast one hardly."""
    machine = parse("h200")
    graph = outcore.capture(nn.Sequential(nn.Linear(2000, 2000), nn.ReLU()), (torch.zeros(64, 2000),))
    costs = estimate(graph, machine)

    def longer(bytes_per_s: float) -> float:
        slow = replace(machine, devices=(replace(machine.devices[0], bandwidth_bytes_per_s=bytes_per_s),))
        weights = weights_on(slow, graph, costs)
        whole = weigh(graph, weights, find_units(graph, weights, "layer"))
        return 8 * sum(whole.scaled(1 / 8, 8).time_s) / sum(whole.time_s)

    assert longer(1e15) == pytest.approx(1.0, rel=0.05)
    assert longer(1e12) > longer(4e12) > 1.5
