"""Factors of operations inside of networks: fitted to calls, 1 where nothing was seen, never below the roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import outcore
from outcore.cost import Operation
from outcore.cost.measured.in_network_ratio import OperationUse, fit_usage, inside_a_network, predicted_alone
from outcore.cost.predicted.calibration import Calibration
from outcore.machine import parse

DEVICE = parse("h200").devices[0]


@pytest.fixture(scope="module")
def alone() -> Calibration:
    found = Calibration.shipped("NVIDIA H200", "tf32")
    assert found is not None
    return replace(found, usage={})


def _linear(rows: int, wide: int) -> Operation:
    return Operation("linear", batch=rows, in_channels=wide, out_channels=4 * wide, dtype="tf32")


CALLS = [_linear(rows, wide) for rows in (4096, 6144, 8192, 11000, 16384) for wide in (256, 384, 512, 768, 1024)]


def _used(calibration: Calibration, times: float) -> list[OperationUse]:
    predicted = inside_a_network(calibration, CALLS, DEVICE)
    pairs = enumerate(zip(CALLS, predicted, strict=True))
    used = [OperationUse(o, times * p.time_s, f"network {i % 3}") for i, (o, p) in pairs]
    return predicted_alone(used, calibration, DEVICE)


def test_calls_that_take_twice_as_long_are_predicted_so(alone: Calibration) -> None:
    with_factors = replace(alone, usage=fit_usage(_used(alone, 2.0), alone))
    between = [_linear(12000, 640), _linear(6000, 512)]
    before, after = (inside_a_network(c, between, DEVICE) for c in (alone, with_factors))
    for first, second in zip(before, after, strict=True):
        assert second.time_s == pytest.approx(2 * first.time_s, rel=0.15)
        assert second.low_s <= second.time_s <= second.high_s


def test_networks_that_were_left_out_say_how_well_it_carries_over(alone: Calibration) -> None:
    errors = fit_usage(_used(alone, 2.0), alone)["linear/forward"].errors
    assert errors["alone"] == pytest.approx(0.5, abs=0.01)
    assert errors["inside"] < 0.15


def test_far_from_every_call_the_calibration_stands_alone(alone: Calibration) -> None:
    with_factors = replace(alone, usage=fit_usage(_used(alone, 2.0), alone))
    far = [_linear(1, 8), Operation("softmax", batch=4096, in_channels=512, dtype="tf32")]
    for first, second in zip(*(inside_a_network(c, far, DEVICE) for c in (alone, with_factors)), strict=True):
        assert second.time_s == pytest.approx(first.time_s, rel=0.05)


def test_nothing_becomes_faster_than_its_roofline(alone: Calibration) -> None:
    fast = replace(alone, usage=fit_usage(_used(alone, 0.01), alone))
    for prediction in inside_a_network(fast, CALLS, DEVICE):
        assert prediction.time_s >= prediction.roofline_s


def test_too_few_calls_give_no_factor(alone: Calibration) -> None:
    assert fit_usage(_used(alone, 2.0)[:5], alone) == {}


def test_factors_of_one_network_alone_are_not_kept(alone: Calibration) -> None:
    calls = [replace(call, network="the only one") for call in _used(alone, 2.0)]
    assert fit_usage(calls, alone) == {}  # whether they carry over to another is not known


def test_a_calibration_keeps_its_usage_in_its_file(alone: Calibration, tmp_path: Path) -> None:
    with_factors = replace(alone, usage=fit_usage(_used(alone, 2.0), alone))
    with_factors.save(tmp_path / "one.json.gz")
    loaded = Calibration.load(tmp_path / "one.json.gz")
    first, second = (inside_a_network(c, CALLS, DEVICE) for c in (with_factors, loaded))
    assert [p.time_s for p in first] == [p.time_s for p in second]


def test_an_estimate_takes_the_calibration_it_is_given(alone: Calibration) -> None:
    import torch

    graph = outcore.capture(torch.nn.Sequential(torch.nn.Linear(512, 2048)), [(8192, 512)])
    slow = replace(alone, usage=fit_usage(_used(alone, 2.0), alone))
    first, second = (outcore.estimate(graph, DEVICE, calibrations={"tf32": c})["0#0"].forward for c in (alone, slow))
    assert first is not None and second is not None
    assert second.median_s == pytest.approx(2 * first.median_s, rel=0.15)
