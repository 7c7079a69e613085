from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_time import measure_optimizer, predict_step
from outcore.machine import Device
from outcore.machine.clock import TimedRuns


def timed(device_s: float, dispatch_s: float) -> tuple[outcore.Graph, Costs]:
    """A chain of four calls, each with the same time forward and backward."""
    graph = outcore.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), [(2, 4)])
    costs = account(graph)
    timing = TimedRuns.of([device_s], dispatch_s=dispatch_s)
    calls = {n: replace(c, forward=timing, backward=timing, time_source="measured") for n, c in costs.calls.items()}
    return graph, replace(costs, calls=calls)


def test_by_estimate_no_call_of_a_cpu_runs_ahead_of_another() -> None:
    layers = nn.Sequential(nn.Linear(512, 512), nn.Flatten(), nn.ReLU(), nn.Flatten())
    graph = outcore.capture(layers, [(256, 512)])
    device = Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 1e11}, dispatch_s=3e-6)
    costs = outcore.estimate(graph, device)
    timings = [t for c in costs.calls.values() for t in (c.forward, c.backward) if t is not None]
    assert all(t.dispatch_s == 0 for t in timings) and min(t.median_s for t in timings) > 0  # views are calls too
    between_s = len(timings) * costs.between_s
    assert 0 < between_s < sum(t.median_s for t in timings) / 20
    assert predict_step(graph, costs).step_s == pytest.approx(sum(t.median_s for t in timings) + between_s)


def test_on_a_cpu_a_step_is_the_sum_of_its_calls() -> None:
    step = predict_step(*timed(2e-3, 0.0), optimizer=TimedRuns.of([1e-3]))
    assert step.step_s == pytest.approx(8 * 2e-3 + 1e-3)
    assert (step.wait_s, step.source, step.unmeasured) == (0.0, "measured", ())


def test_large_operations_take_the_device_s_time_and_small_ones_the_host_s() -> None:
    large, small = predict_step(*timed(2e-3, 1e-5)), predict_step(*timed(1e-6, 1e-5))
    assert large.step_s == pytest.approx(8 * 2e-3 + 1e-5)
    assert small.step_s == pytest.approx(8 * 1e-5 + 1e-6)
    assert small.wait_s > 0.9 * small.step_s


def test_what_lies_between_the_calls_counts_for_every_call_and_direction() -> None:
    graph, costs = timed(1e-6, 1e-5)
    apart = predict_step(graph, replace(costs, between_s=2e-5))
    assert apart.step_s == pytest.approx(8 * 3e-5 + 1e-6)
    on_cpu = predict_step(graph, replace(timed(2e-3, 0.0)[1], between_s=2e-5))
    assert on_cpu.step_s == pytest.approx(8 * (2e-3 + 2e-5))


def test_an_optimizer_of_many_kernels_starts_before_it_is_issued() -> None:
    bound_by_host = predict_step(*timed(1e-6, 1e-5), optimizer=TimedRuns.of([1e-6], dispatch_s=1e-3))
    assert bound_by_host.step_s == pytest.approx(8e-5 + 1e-3)
    bound_by_device = predict_step(*timed(2e-3, 1e-5), optimizer=TimedRuns.of([3e-3], dispatch_s=1e-3))
    assert bound_by_device.step_s == pytest.approx(8 * 2e-3 + 1e-5 + 3e-3)


def test_an_optimizer_s_first_kernel_waits_for_what_comes_before_it() -> None:
    late = replace(TimedRuns.of([1e-3], dispatch_s=5e-4), lead_s=4e-4)
    assert predict_step(*timed(1e-6, 1e-5), optimizer=late).step_s == pytest.approx(8e-5 + 4e-4 + 1e-3)
    hidden = predict_step(*timed(2e-3, 1e-5), optimizer=late)
    assert hidden.step_s == pytest.approx(8 * 2e-3 + 1e-5 + 1e-3)


def test_starting_backward_takes_the_host_s_time_once() -> None:
    graph, costs = timed(1e-6, 1e-5)
    assert predict_step(graph, replace(costs, start_s=1e-4)).step_s == pytest.approx(8e-5 + 1e-4 + 1e-6)


def test_gradients_that_meet_are_added_up() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.left(y) + self.right(y)

    graph = outcore.capture(Fork(), [(2, 4)])
    costs = account(graph)
    timing, tiny = TimedRuns.of([1e-3]), TimedRuns.of([1e-6], dispatch_s=1e-5)
    calls = {n: replace(c, forward=timing, backward=timing, time_source="measured") for n, c in costs.calls.items()}
    plain = predict_step(graph, replace(costs, calls=calls))
    summed = predict_step(graph, replace(costs, calls=calls, sum_bytes_per_s=96e3))
    assert summed.step_s - plain.step_s == pytest.approx(3 * 2 * 4 * 4 / 96e3)
    small = {n: replace(c, forward=tiny, backward=tiny) for n, c in costs.calls.items()}
    issued = [
        predict_step(graph, replace(costs, calls=small, sum_bytes_per_s=1e12, sum_dispatch_s=s)) for s in (0, 1e-3)
    ]
    assert issued[1].step_s - issued[0].step_s == pytest.approx(1e-3)


def test_the_interval_lies_around_the_step() -> None:
    graph, costs = timed(2e-3, 0.0)
    timing = TimedRuns(1e-3, 2e-3, 4e-3, 2e-3, 5)
    calls = {n: replace(c, forward=timing, backward=None) for n, c in costs.calls.items()}
    step = predict_step(graph, replace(costs, calls=calls))
    assert step.interval_s == pytest.approx((8e-3 - 4e-3, 8e-3 + 8e-3))


def test_bringing_the_batch_to_the_device_takes_time() -> None:
    step = predict_step(*timed(1e-3, 0.0), input_bytes_per_s=1e6)
    assert step.transfer_s == pytest.approx(2 * 4 * 4 / 1e6)
    assert step.step_s == pytest.approx(8e-3 + step.transfer_s)


def test_what_is_not_known_is_named_and_the_least_trustworthy_source_counts() -> None:
    graph, costs = timed(1e-3, 0.0)
    calls = dict(costs.calls)
    calls["0#0"] = replace(calls["0#0"], forward=None, backward=None, time_source="unknown")
    calls["1#0"] = replace(calls["1#0"], time_source="scaled")
    step = predict_step(graph, replace(costs, calls=calls))
    assert step.unmeasured == ("0#0",)
    assert step.source == "scaled"
    assert "without 1 calls" in str(step)


def test_an_optimizer_is_timed_on_parameters_of_its_own() -> None:
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    timing = measure_optimizer(model, torch.optim.Adam, runs=3)
    assert timing.median_s > 0
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert measure_optimizer(nn.ReLU(), torch.optim.Adam).median_s == 0.0


def test_a_measured_network_has_a_predicted_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    graph = outcore.capture(model, [(2, 3, 32, 32)])
    step = predict_step(graph, measure(graph, "cpu", runs=2), optimizer=measure_optimizer(model, torch.optim.Adam))
    assert step.step_s > 0 and not step.unmeasured
    assert "forward" in str(step) and "optimizer" in str(step)


def test_a_call_without_backward_does_not_end_the_others() -> None:
    """The second of four calls has none; the first, which comes after it in backward, has."""
    graph, costs = timed(2e-3, 0.0)
    calls = dict(costs.calls)
    second = list(calls)[1]
    calls[second] = replace(calls[second], backward=None)
    step = predict_step(graph, replace(costs, calls=calls))
    assert step.step_s == pytest.approx(7 * 2e-3)


def test_a_timing_has_its_statistics_in_their_places() -> None:
    timing = TimedRuns.of([5.0, 1.0, 2.0])
    assert (timing.min_s, timing.median_s, timing.max_s, timing.mean_s, timing.runs) == (1.0, 2.0, 5.0, 8 / 3, 3)
