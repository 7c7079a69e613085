"""Which norms are fused: by prediction, then by measurement."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion.batch_norm_relu import norms_of
from outcore.memory.op_fusion.profitability import as_fused, step_s, worth_fusing
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.peak_monitor import MeasuredStep, PeakMonitor

RATE = 1e9


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = (3, 4, 8, 16)
    layers = [
        layer for i, o in itertools.pairwise(sizes) for layer in (nn.Conv2d(i, o, 3), nn.BatchNorm2d(o), nn.ReLU())
    ]
    return nn.Sequential(*layers)


def measured(model: nn.Module, images: torch.Tensor, device_s: float, host_s: float) -> tuple[Any, Costs]:
    """A graph with costs: so much time per call and direction on the device, and for the host to issue it."""
    graph = outcore.capture(model, (images,))
    costs = outcore.measure(graph, runs=2)
    timing = TimedRuns.of([device_s], dispatch_s=host_s)
    calls = {n: replace(c, forward=timing, backward=timing) for n, c in costs.calls.items()}
    return graph, replace(costs, calls=calls, between_s=0.0, start_s=0.0)


def test_all_norms_are_fused_where_the_host_has_time() -> None:
    model, images = network(), torch.randn(2, 3, 12, 12)
    graph, costs = measured(model, images, device_s=1.0, host_s=1e-6)
    norms = norms_of(graph, model)
    assert worth_fusing(norms, costs, RATE) == norms and len(norms) == 3
    fused = as_fused(costs, norms, RATE)
    relu = fused.calls["2#0"]
    assert relu.forward is not None and relu.forward.median_s == 0 and relu.saved == ()
    assert step_s(fused) < step_s(costs)


def test_none_is_fused_where_the_host_is_the_slower_one() -> None:
    model, images = network(), torch.randn(2, 3, 12, 12)
    graph, costs = measured(model, images, device_s=1e-4, host_s=1e-3)
    assert worth_fusing(norms_of(graph, model), costs, RATE) == {}


def test_in_a_cuda_graph_the_host_does_not_count() -> None:
    model, images = network(), torch.randn(2, 3, 12, 12)
    graph, costs = measured(model, images, device_s=1e-4, host_s=1e-3)
    norms = norms_of(graph, model)
    assert worth_fusing(norms, costs, RATE, issued=False) == norms
    calls = {n: replace(c, forward=TimedRuns.of([1e-9]), backward=TimedRuns.of([1e-9])) for n, c in costs.calls.items()}
    assert worth_fusing(norms, replace(costs, calls=calls), RATE, issued=False) == {}


def test_those_that_save_most_are_fused_as_long_as_the_host_keeps_ahead() -> None:
    model, images = network(), torch.randn(2, 3, 12, 12)
    graph, costs = measured(model, images, device_s=1.0, host_s=0.5)
    norms = norms_of(graph, model)
    calls = dict(costs.calls)
    calls["4#0"] = replace(calls["4#0"], forward=TimedRuns.of([3.0], dispatch_s=0.5))
    costs = replace(costs, calls=calls)
    found = worth_fusing(norms, costs, RATE)
    assert list(found) == ["4#0"]
    assert step_s(as_fused(costs, found, RATE)) <= step_s(costs)


def test_nothing_is_known_of_the_host_on_a_cpu() -> None:
    model, images = network(), torch.randn(2, 3, 12, 12)
    graph, costs = measured(model, images, device_s=1e-9, host_s=0.0)
    norms = norms_of(graph, model)
    assert worth_fusing(norms, costs, RATE) == norms
    assert as_fused(costs, norms, RATE).calls["1#0"] == costs.calls["1#0"]


@pytest.mark.parametrize(("fused_s", "library_s", "stays"), [(9.0, 8.0, False), (8.0, 9.0, True), (1e-9, None, True)])
def test_the_first_steps_decide(
    monkeypatch: pytest.MonkeyPatch, fused_s: float, library_s: float | None, stays: bool
) -> None:
    model, images = network().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    twin = copy.deepcopy(model)
    _, costs = measured(model, images, device_s=0.01, host_s=0.0)
    watched: list[bool] = []

    def look(self: PeakMonitor, *_: Any) -> MeasuredStep:
        watched.append(bool(next(iter(managed_forward.admitted.values())).compiled.instead))  # type: ignore[union-attr]
        return MeasuredStep(None, fused_s if len(watched) == 1 else library_s or 0.0)

    monkeypatch.setattr(PeakMonitor, "look", look)
    outcore.within(model, (images,), memory=None, costs=costs, exact="reassociated", quiet=True)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            each(images).square().sum().backward()
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-11, atol=1e-11)
        for mine, plain in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)
    (entry,) = managed_forward.admitted.values()
    assert entry is not None and bool(entry.compiled.instead) is stays
    assert watched == ([True] if library_s is None else [True, False])
    assert list(managed_forward.ab_test.times.values()) == ([] if library_s is None else [(fused_s, library_s)])
