"""What the host does to issue a call: counted by operation, compared at its own pace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured import host_speed, host_time
from outcore.cost.measured.host_speed import HostSpeed, reference_work_s
from outcore.cost.measured.launch_count import issue_of
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_time import predict_step
from outcore.graph import Graph
from outcore.machine import parse
from outcore.machine.clock import TimedRuns

aten = torch.ops.aten


def test_a_call_s_work_is_that_of_the_operations_below_it() -> None:
    graph = outcore.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [(2, 4)])
    costs = account(graph)
    assert costs["0#0"].issue_forward == pytest.approx(issue_of(aten.t.default) + issue_of(aten.addmm.default))
    assert costs["1#0"].issue_forward == pytest.approx(issue_of(aten.relu.default))
    assert costs["1#0"].issue_backward == pytest.approx(issue_of(aten.threshold_backward.default))


def test_casts_under_autocast_are_work_for_the_host() -> None:
    class Half(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    plain, half = (outcore.capture(nn.Sequential(kind(4, 4)), [(2, 4)]) for kind in (nn.Linear, Half))
    work = [sum(c.issue_forward for c in account(graph).calls.values()) for graph in (plain, half)]
    assert work[1] == pytest.approx(work[0] + 3 * issue_of(aten._to_copy.default))


def test_a_bias_is_work_of_its_own_in_both_directions() -> None:
    layers = (nn.Conv2d(3, 4, 3, bias=bias) for bias in (False, True))
    without, given = (account(outcore.capture(nn.Sequential(c, nn.ReLU()), [(1, 3, 8, 8)]))["0#0"] for c in layers)
    assert given.issue_forward > without.issue_forward and given.issue_backward > without.issue_backward


def test_kinds_of_operations_differ_and_bookkeeping_is_free() -> None:
    order = [aten.detach.default, aten.view.default, aten.relu.default, aten.mm.default, aten.convolution.default]
    weights = [issue_of(operation) for operation in order]
    assert weights == sorted(weights) and weights[0] == 0.0
    assert issue_of(aten.native_batch_norm_backward.default) != issue_of(aten.native_layer_norm_backward.default)


def test_a_small_network_on_a_gpu_is_estimated_by_its_host() -> None:
    graph = outcore.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))), [(2, 4)])
    quick = parse("h200").devices[0]
    slow = replace(quick, dispatch_s=3 * quick.dispatch_s)
    steps = [predict_step(graph, outcore.estimate(graph, device)).step_s for device in (quick, slow)]
    assert steps[1] == pytest.approx(3 * steps[0], rel=0.05)


def test_times_taken_at_different_paces_are_equal_in_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    beats, now = HostSpeed(), [1e-4]
    monkeypatch.setattr(host_speed, "reference_work_s", lambda: now[0])
    quick = beats.counted(TimedRuns.of([1e-3], dispatch_s=1e-5), 1e-4)
    now[0] = 2e-4
    slow = beats.counted(TimedRuns.of([1e-3], dispatch_s=2e-5), 2e-4)
    assert quick.dispatch_s == slow.dispatch_s
    restored = beats.in_seconds(slow)
    assert restored is not None and restored.dispatch_s == pytest.approx(1e-5, rel=0.15) and restored.median_s == 1e-3
    assert beats.in_seconds(None) is None


def test_a_slow_spell_does_not_change_the_pace() -> None:
    assert HostSpeed().reference_s == 0.0
    beats = HostSpeed()
    beats.seen += [7.4e-5, 7.5e-5, 7.6e-5] * 10 + [14e-5] * 60
    assert beats.reference_s == pytest.approx(7.5e-5, rel=0.02)


def test_a_beat_takes_time_and_changes_nothing() -> None:
    before = torch.get_rng_state()
    assert reference_work_s() > 0
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_between_calls_is_given_for_the_pace_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(graph: Graph) -> Costs:
        costs, timing = account(graph), TimedRuns.of([1e-4])
        calls = {n: replace(c, forward=timing, backward=None) for n, c in costs.calls.items()}
        return replace(costs, calls=calls, beat_s=1e-4)

    monkeypatch.setattr(host_time, "_known", {})
    monkeypatch.setattr(host_time, "_step_s", lambda *_: 1.0)
    here = host_time.between_calls(torch.device("cpu"), measure)
    assert host_time.between_calls(torch.device("cpu"), measure, reference=3e-4) == pytest.approx(3 * here)
