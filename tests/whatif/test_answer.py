"""Questions and answers: what is asked is understood or refused, and answers have the signs that they must have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outcore
from outcore.cost.profile import profile
from outcore.errors import WhatIfError
from outcore.machine import Device, parse
from outcore.machine.clock import TimedRuns
from outcore.whatif.anchor import Anchor
from outcore.whatif.carry_over import carry_costs, wave_ratio
from outcore.whatif.compiled import compiled_tasks, fused_groups
from outcore.whatif.elsewhere import carried_to, try_gpus
from outcore.whatif.recording import SetupRecording, _ratio, _times, record_setup, turned
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques
from outcore.whatif.trial import run_in_turn
from tests.whatif.jobs import images

CPU = Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 1e11}, dispatch_s=3e-6)
H200, V100 = (parse(name).devices[0] for name in ("h200", "v100"))


def gains(questions: list[str], size: int = 4) -> list[float]:
    return [a.gain for a in outcore.whatif.ask(images(size), questions, device=H200).answers]


def test_where_the_host_sets_the_pace_faster_kernels_gain_nothing() -> None:
    faster, free, graphs, host = gains(["conv:0.1x", "0=free", "graphs", "host:0.5x"])
    assert faster == pytest.approx(1.0, abs=1e-6)
    assert free > 1.01 and graphs > 1.5 and host > 1.3


def test_where_the_device_sets_the_pace_a_faster_host_gains_nothing() -> None:
    host, free, batch = gains(["host:0.5x", "forward=free", "batch=8192"], size=4096)
    assert host == pytest.approx(1.0, abs=0.05) and free > 1.2 and 0.9 < batch < 1.2


@pytest.mark.parametrize("name", ["h200", "v100", "cpu"])
@pytest.mark.parametrize("size", [1, 64])
def test_a_step_has_one_interval(name: str, size: int) -> None:
    device = CPU if name == "cpu" else parse(name).devices[0]
    job = images(size)
    job = replace(job, model=lambda: Branches())
    found, asked = profile(job, device).step, outcore.whatif.ask(job, [], device=device).base
    assert asked.step_s == pytest.approx(found.step_s)
    assert (asked.low_s, asked.high_s) == pytest.approx(found.interval_s)
    assert found.interval_s[0] < found.step_s < found.interval_s[1]


def test_a_step_that_many_techniques_change_still_takes_some_time() -> None:
    found = outcore.whatif.ask(images(), ["amp+compile+graphs+fused", "graphs", "amp+batch=8"], device=H200)
    for answer in found.answers:
        assert 0 < answer.low_s < answer.step_s < answer.high_s and answer.gain_interval[1] < float("inf")


class Branches(torch.nn.Module):
    """A value that two layers read, so that gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (torch.nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.out = torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        found: torch.Tensor = self.out((self.a(x) + self.b(x).relu()).mean((2, 3)))
        return found


def test_a_budget_may_be_a_share_of_what_the_step_holds() -> None:
    found = outcore.whatif.ask(images(), ["within=80%", "batch=8+within=80%"], device=V100)
    plain = record_setup(TrainingSetup(images(), 8), V100).peak_bytes
    for answer, whole in zip(found.answers, (found.base.peak_bytes, plain), strict=True):
        assert 0.4 * whole < answer.peak_bytes <= 0.8 * whole


def test_techniques_join() -> None:
    alone = gains(["graphs", "fused", "graphs+fused"])
    assert alone[2] >= max(alone[:2]) * 0.999


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ampp", "did you mean amp"),
        ("", "known are amp"),
        ("amp+turbo", "turbo"),
        ("batch=many", "whole number"),
        ("batch", "batch=64"),
        ("link=fast", "2x"),
        ("conv:x", "0.5x"),
        ("amp=int4", "amp=fp16"),
        ("channels_last=yes", "not understood"),
    ],
)
def test_an_unknown_technique_names_the_known_ones(text: str, said: str) -> None:
    with pytest.raises(WhatIfError, match=said):
        parse_techniques(text)


@pytest.mark.parametrize(("text", "said"), [("layer9=free", "known are 0, 1"), ("Conv3d:0.5x", "did you mean Conv2d")])
def test_an_unknown_block_or_kind_names_the_known_ones(text: str, said: str) -> None:
    with pytest.raises(WhatIfError, match=said):
        gains([text])


def test_channels_last_changes_strides_and_nothing_else() -> None:
    graph = images().capture()
    other = turned(graph)
    for name, value in graph.values.items():
        shape, stride = other.values[name].shape, other.values[name].stride
        assert shape == value.shape
        if len(shape) == 4 and value.bytes:
            expected = torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()
            assert stride == expected


@pytest.mark.parametrize(("calls", "faster"), [(1, False), (30, True)])
def test_compiled_launches_go_by_matrix_products(calls: int, faster: bool) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), *[torch.nn.ReLU()] * calls)] * 4)

    job = outcore.Job(model=model, batch=lambda size: (torch.randn(size, 8), None), size=2)
    found = record_setup(replace(TrainingSetup(job), compiled=True), H200)
    before, after = found.step.simulate(), compiled_tasks(found.step, found).simulate()
    assert after.busy_s("host") == pytest.approx(4 * 42 * H200.dispatch_s)
    assert (after.busy_s("host") < before.busy_s("host")) == faster


def test_groups_of_compiled_code_are_what_lies_between_matrix_products() -> None:
    recording = record_setup(TrainingSetup(images()), H200)
    costs = recording.profile.costs
    fusible = {n for n, c in costs.calls.items() if not c.flops_forward}
    groups = fused_groups(recording.profile.graph, fusible)
    assert sorted(c for g in groups for c in g.calls) == sorted(fusible)
    norm = next(g for g in groups if "1#0" in g.calls)
    size = recording.profile.graph.values["0#0:out"].bytes
    assert norm.calls == ["1#0", "2#0"] and norm.moved_forward == 3 * size


def test_a_step_is_anchored_to_what_was_measured() -> None:
    step = record_setup(TrainingSetup(images()), H200).step
    simulated = step.simulate()
    for device, host in ((1.7, 1.0), (0.6, 2.0), (1.0, 1.0)):
        real = Anchor(device, host).apply(step).simulate()
        found = Anchor.of(step, real.step_s, real.busy_s("device"), real.busy_s("host"))
        assert (found.device, found.host) == pytest.approx((device, host), rel=1e-6)
        again = Anchor.of(step, real.step_s, real.busy_s("device")).apply(step).simulate()
        assert again.step_s == pytest.approx(real.step_s, rel=0.07)
    assert simulated.bound_by == "host"


def test_a_host_that_was_not_timed_is_as_slow_as_in_other_steps_and_one_that_waits_for_the_device_is_not_slow() -> None:
    step = record_setup(TrainingSetup(images(4096)), H200).step
    simulated = step.simulate()
    assert simulated.bound_by == "device"
    busy_s = simulated.busy_s("device")
    found = Anchor.of(step, 1.1 * simulated.step_s, busy_s, host=1.5)
    assert (found.device, found.host) == pytest.approx((1.0, 1.5))
    queued = Anchor.of(step, simulated.step_s, busy_s, issue_s=simulated.step_s)  # launches waited in the queue
    assert queued.apply(step).simulate().step_s <= 1.11 * simulated.step_s


def test_a_gain_within_its_interval_is_no_clear_change() -> None:
    small = outcore.whatif.ask(images(4), ["graphs", "relu:0.9x"], device=H200).answers
    large = outcore.whatif.ask(images(4096), ["graphs", "batch=1"], device=H200).answers
    said = [answer.verdict for answer in (*small, *large)]
    assert said == ["faster", "no clear change", "no clear change", "slower"]
    for answer in (*small, *large):
        low, high = answer.gain_interval
        assert low <= answer.gain <= high and answer.to_json()["verdict"] == answer.verdict


def test_work_that_is_said_to_take_less_makes_a_step_faster_however_little_is_known_of_it() -> None:
    unknown = Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 1e11})
    asked = outcore.whatif.ask(images(64), ["conv:0.5x", "conv=free", "conv:2x"], device=unknown)
    assert asked.base.high_s > 1.5 * asked.base.low_s
    assert [answer.verdict for answer in asked.answers] == ["faster", "faster", "slower"]
    for answer in asked.answers:
        assert answer.gain_interval[0] <= answer.gain <= answer.gain_interval[1]


def test_fewer_multiprocessors_slow_poolings_down_and_norms_of_few_channels_not() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.MaxPool2d(2))

    job = outcore.Job(model=model, batch=lambda n: (torch.randn(n, 3, 66, 66), None), size=256)
    found = record_setup(TrainingSetup(job), H200)
    assert H200.sms is not None
    half = replace(H200, sms=H200.sms // 2, rates={name: rate / 2 for name, rate in H200.rates.items()})
    costs = carry_costs(found.profile.costs, found.profile.graph, H200, half)
    ratios = []
    for name in ("1#0", "2#0"):
        before, after = found.profile.costs.calls[name].backward, costs.calls[name].backward
        assert before is not None and after is not None
        ratios.append(after.median_s / before.median_s)
    assert ratios[0] == pytest.approx(1.0) and 1.2 < ratios[1] <= 2.0


def test_carrying_over_to_the_same_gpu_changes_nothing() -> None:
    found = record_setup(TrainingSetup(images(64)), H200)
    same = carried_to(found, replace(H200, name="another of them"))
    assert same.step.simulate().step_s == pytest.approx(found.step.simulate().step_s)


def test_an_estimate_is_corrected_by_what_was_measured_of_another() -> None:
    def slower(timing: TimedRuns | None, by: float) -> TimedRuns | None:
        if timing is None:
            return None
        times = (timing.min_s, timing.median_s, timing.max_s, timing.mean_s)
        return TimedRuns(*(by * t for t in times), 7, by * timing.dispatch_s)

    def measured(of: SetupRecording, by: float) -> SetupRecording:
        costs = of.profile.costs
        calls = {
            name: replace(cost, forward=slower(cost.forward, by), backward=slower(cost.backward, by))
            for name, cost in list(costs.calls.items())[1:]  # one could not be measured
        }
        profile = replace(of.profile, costs=replace(costs, calls=calls, between_s=1e-3))
        return replace(of, profile=profile, optimizer=slower(of.optimizer, by))

    origin, asked = (record_setup(TrainingSetup(images(size)), H200) for size in (4, 64))
    found = asked.carried(origin, measured(origin, 3.0))
    first, *others = asked.profile.costs.calls
    assert found.profile.costs.calls[first] == asked.profile.costs.calls[first]
    for name in others:
        cost, estimated = found.profile.costs.calls[name], asked.profile.costs.calls[name]
        for mine, plain in ((cost.forward, estimated.forward), (cost.backward, estimated.backward)):
            assert (mine is None) == (plain is None)
            if mine is not None and plain is not None and plain.median_s:
                assert mine.median_s == pytest.approx(3 * plain.median_s) and mine.runs == 7
                assert mine.dispatch_s == pytest.approx(3 * plain.dispatch_s)
    assert found.profile.costs.between_s == 1e-3
    assert asked.optimizer is not None and found.optimizer is not None
    assert found.optimizer.median_s == pytest.approx(3 * asked.optimizer.median_s)
    assert found.step.simulate().step_s > asked.step.simulate().step_s


def test_a_carried_time_keeps_half_of_the_spread_and_no_ratio_is_beyond_all_reason() -> None:
    estimate, origin = TimedRuns(2.0, 4.0, 8.0, 4.0, 1, 0.4, 0.2), TimedRuns(1.0, 2.0, 3.0, 2.0, 1, 0.1, 0.1)
    found = _ratio(estimate, origin, TimedRuns(9.0, 10.0, 11.0, 10.0, 5, 0.3, 0.1))
    assert (found.min_s, found.median_s, found.max_s, found.mean_s) == (15.0, 20.0, 30.0, 20.0)
    assert found.runs == 5 and (found.dispatch_s, found.lead_s) == pytest.approx((1.2, 0.2))
    far = _ratio(
        replace(estimate, dispatch_s=100.0, lead_s=200.0), origin, TimedRuns(9.0, 10.0, 11.0, 10.0, 5, 0.3, 0.1)
    )
    assert (far.dispatch_s, far.lead_s) == pytest.approx((6.0, 2.0))  # what was measured, times the bound
    nothing = TimedRuns(0.0, 0.0, 0.0, 0.0, 1, 0.1)
    free = _ratio(estimate, nothing, TimedRuns(9.0, 10.0, 11.0, 10.0, 5, 0.3))
    assert free.median_s == 4.0 and free.dispatch_s == pytest.approx(1.2)
    assert _times(3.0, 1000.0, 1.0) == 60.0 and _times(3.0, 1.0, 1000.0) == pytest.approx(0.15)
    assert _times(3.0, 0.0, 1.0) == _times(3.0, 1.0, 0.0) == 3.0


def test_a_gpu_that_is_better_in_everything_is_faster_in_every_call() -> None:
    found = record_setup(TrainingSetup(images(64)), H200)
    rates = {name: 2 * rate for name, rate in H200.rates.items()}
    assert H200.sms is not None
    better = replace(H200, bandwidth_bytes_per_s=2 * H200.bandwidth_bytes_per_s, rates=rates, sms=2 * H200.sms)
    costs = carry_costs(found.profile.costs, found.profile.graph, H200, better)
    for name, cost in found.profile.costs.calls.items():
        for before, after in ((cost.forward, costs.calls[name].forward), (cost.backward, costs.calls[name].backward)):
            if before is not None and after is not None:
                assert 0.499 * before.median_s <= after.median_s <= before.median_s * (1 + 1e-9)
    assert wave_ratio(200, H200, better) == 0.5 and wave_ratio(20, H200, better) == 1.0


def test_other_gpus_with_price_and_largest_batch() -> None:
    found = try_gpus(images(64), [H200, V100], prices=[2.0], epoch_samples=1000, watts=[700, 300])
    first, second = found.rows
    for row, (low, high) in ((first, (0.9, 1.1)), (second, (0.6, 1.3))):  # the H200 has a calibration of its own
        assert low * row.step_s <= row.low_s < row.step_s < row.high_s <= high * row.step_s
    assert second.high_s / second.low_s > first.high_s / first.low_s
    assert first.step_s <= second.step_s and first.fits
    tiny = replace(V100, memory_bytes=2 << 20)
    (row,) = try_gpus(images(64), [tiny], largest=True).rows
    assert not row.fits and row.largest_batch is not None and 1 <= row.largest_batch < 64
    assert first.cost_per_epoch == pytest.approx(1000 / first.samples_per_s / 3600 * 2.0)
    assert second.energy_per_epoch_kwh == pytest.approx(1000 / second.samples_per_s / 3600 * 0.3)


def test_what_can_be_run_is_run_and_shown_beside_the_prediction() -> None:
    cpu = replace(V100, kind="cpu", name="cpu")
    found = outcore.whatif.ask(images(), ["batch=8", "fused", "0=free", "graphs"], device=cpu, verify=True, seconds=0.1)
    batch, fused, free, graphs = found.answers
    assert found.base.error == pytest.approx(0.0, abs=1e-6)
    assert batch.trial is not None and fused.trial is not None and batch.measured_gain is not None
    assert free.trial is None and "cannot be run" in free.not_run and "GPU" in graphs.not_run
    plain = TrainingSetup(images())
    trials = run_in_turn((plain, replace(plain, fused_optimizer=True)), "cpu", seconds=0.05)
    assert len(trials) == 2 and trials[0].steps == trials[1].steps
