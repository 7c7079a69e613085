from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost import account
from outcore.cost.costs import CallCost, Costs
from outcore.cost.saved import Saved
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.clock import TimedRuns
from outcore.planner import CallWeights, split
from outcore.planner.partition.units import find_units
from tests.planner.shape_weights import weights_from_shapes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[0].mul_(2)
        return self.c(self.b(y))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(self.norm(x)))


def test_tied_parameters_stay_together_or_are_copied() -> None:
    graph = outcore.capture(Tied(), torch.zeros(2, 3, dtype=torch.long))
    weights = weights_from_shapes(graph)
    assert weights.tied == {"embed.weight": ("embed#0", "head#0")}
    assert weights.parameter_bytes("embed#0") == 16 * 8 * 4 and weights.parameter_bytes("head#0") == 0
    with pytest.raises(PlanError, match=r'embed\.weight is shared by embed#0 and head#0: tied="copies"'):
        split(graph, weights, stages=2)
    cut = split(graph, weights, stages=2, tied="copies")
    assert cut.tied == {"embed.weight": (0, 1)}
    assert all(stage.gradient_bytes >= 16 * 8 * 4 for stage in cut.stages.stages)


def test_calls_that_share_written_memory_stay_together() -> None:
    graph = outcore.capture(InPlace(), torch.ones(2, 4))
    units = find_units(graph, weights_from_shapes(graph))
    of_call = units.of_call
    assert of_call["mul_()#0"] == of_call["b#0"] != of_call["c#0"]


def test_a_module_with_statistics_is_not_torn() -> None:
    graph = outcore.capture(Shared(), torch.ones(2, 4))
    assert len(find_units(graph, weights_from_shapes(graph))) == 1


def test_weights_come_from_costs_and_missing_calls_are_named() -> None:
    graph = outcore.capture(InPlace(), torch.ones(2, 4))
    times = {"forward": TimedRuns.of([1.0]), "backward": TimedRuns.of([2.0])}
    saved = (Saved("input", "value", 7), Saved("a.weight", "parameter", 64))
    rows = {n: CallCost(n, n, "", saved=saved, workspace_backward_bytes=3, **times) for n in graph.calls}
    sizes = dict.fromkeys(["a.weight", "b.weight", "c.weight"], 80)
    costs = Costs("", graph.fingerprint, "cpu", "cpu", rows, sizes, between_s=0.25)
    weights = CallWeights.of(graph, costs)
    weight = weights.calls["a#0"]
    assert weight.time_s == 1.25 + 2.25 and weight.host_forward_s == 0  # on a CPU, with what lies between calls
    assert weight.saved_bytes == 7 and weight.workspace_bytes == 3
    assert sum(weights.parameter_bytes(c) for c in graph.calls) == 3 * 80
    issued = {n: replace(row, forward=TimedRuns.of([1.0], dispatch_s=0.5)) for n, row in rows.items()}
    weight = CallWeights.of(graph, replace(costs, calls=issued)).calls["a#0"]
    assert (weight.forward_s, weight.host_forward_s) == (1.0, 0.75)
    # A host that takes so much longer than launching does waits for the device.
    weight = CallWeights.of(graph, replace(costs, calls=issued, sum_dispatch_s=1e-4)).calls["a#0"]
    assert weight.host_forward_s == pytest.approx(0.25 + 10 * 1e-4 * max(1.0, issued["a#0"].issue_forward))
    quick = {n: replace(row, forward=TimedRuns.of([1e-5], dispatch_s=3e-4)) for n, row in rows.items()}
    weight = CallWeights.of(graph, replace(costs, calls=quick, sum_dispatch_s=1e-4)).calls["a#0"]
    assert weight.host_forward_s == pytest.approx(0.25 + 3e-4)  # a small call is bound by its host
    with pytest.raises(PlanError, match=r"the costs say nothing of a#0 \(and 4 other calls of 5\)"):
        CallWeights.of(graph, replace(costs, calls={}))


def test_measured_costs_become_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 2))
    graph = outcore.capture(model, torch.ones(2, 3, 16, 16))
    costs = account(graph)
    weights = CallWeights.of(graph, costs)
    assert sum(weights.parameters.values()) == sum(p.numel() * 4 for p in model.parameters())
    assert weights.calls["1#0"].saved["0#0:out"] == 2 * 8 * 196 * 4
    guessed = weights_from_shapes(graph)
    assert sum(guessed.parameters.values()) == sum(weights.parameters.values())
    for name in graph.calls:
        real, told = weights.calls[name].saved, guessed.calls[name].saved
        assert {k for k in real if k in graph.values} == {k for k in told if k in graph.values}
        assert sum(real.values()) == sum(told.values())
    cut = split(graph, weights, stages=2, balance="memory")
    assert max(cut.peak_bytes) > 0


def test_estimates_count_multiplications_and_what_backward_keeps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    graph = outcore.capture(model, torch.ones(2, 3, 16, 16))
    weights = weights_from_shapes(graph, flops_per_s=1.0, bytes_per_s=float("inf"), launch_s=0.0)
    # The bias of the first counts as one more input pixel.
    assert weights.calls["0#0"].forward_s == 2 * 2 * 8 * 256 * (27 + 1)
    assert weights.calls["2#0"].forward_s == 2 * 2 * 4 * 256 * 8
    assert weights.calls["2#0"].backward_s == 2 * weights.calls["2#0"].forward_s
    assert weights.calls["0#0"].backward_s == weights.calls["0#0"].forward_s  # nothing flows into the image
    kept = {name for weight in weights.calls.values() for name in weight.saved}
    assert kept == {"input", "1#0:out"}


def test_a_graph_read_from_a_file_is_estimated_too() -> None:
    graph = outcore.capture(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.ones(2, 4))
    read = Graph.from_json(graph.to_json())
    assert sum(weights_from_shapes(read).parameters.values()) == sum(weights_from_shapes(graph).parameters.values())
