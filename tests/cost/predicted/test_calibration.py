"""A fitted calibration stays within bounds, says how far it can be trusted, and reads back identical."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outcore.cost import Calibration, Ceiling, Operation, Sample, fit_calibration
from outcore.cost.measured.calibrate import calibrate, collect
from outcore.cost.measured.op_sweep import draw, sweep
from outcore.cost.predicted import calibration as calibration_module
from outcore.cost.predicted.calibration import file_name
from outcore.cost.predicted.features import NAMES, Matrix, features
from outcore.cost.predicted.operation import KINDS
from outcore.cost.predicted.regression import METHODS, fit_regression, regression_from_json
from outcore.errors import MachineError
from outcore.machine import Device, find
from outcore.machine.clock import TimedRuns

DEVICE = Device("a card", "cuda", 16 << 30, 1e12, {"fp32": 1e13}, sms=80, launch_s=2e-6, dispatch_s=5e-6)


def invented(operation: Operation) -> TimedRuns:
    """A device with a smooth efficiency, a jump for odd channels, and three per cent of noise."""
    roofline_s = DEVICE.roofline_s(flops=operation.flops, nbytes=operation.nbytes, dtype="fp32")
    efficiency = 0.8 / (1 + 3e5 / (operation.flops + operation.nbytes)) / (2 if operation.in_channels % 8 else 1)
    noise = 1 + 0.03 * random.Random(str(operation)).random()
    return TimedRuns.of([roofline_s / efficiency * noise] * 3, dispatch_s=7e-6)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    operations = itertools.islice(sweep(DEVICE, dtype="fp32", kinds=["conv"]), 140)
    samples = [Sample(operation, invented(operation)) for operation in operations]
    return fit_calibration(samples, DEVICE, "fp32", about={"made": "up"}, methods=("polynomial", "trees"))


def wild(count: int) -> list[Operation]:
    """Operations of all kinds and of any size, far beyond what was sampled."""
    source = random.Random(3)
    drawn = [
        draw(kind, dtype="fp32", source=source) for kind in ("conv", "elementwise", "linear") for _ in range(count)
    ]
    return drawn + [replace(o, batch=o.batch * 1000) for o in drawn] + [o.backward() for o in drawn]


def test_efficiency_never_leaves_zero_to_one(calibration: Calibration) -> None:
    operations = wild(60)
    for operation, prediction in zip(operations, calibration.predict(operations), strict=True):
        assert 0 < prediction.efficiency <= 1
        assert prediction.time_s >= prediction.roofline_s > 0 or math.isclose(prediction.time_s, prediction.roofline_s)
        assert prediction.low_s <= prediction.high_s
        assert math.isfinite(prediction.time_s), operation


def test_trust_is_told(calibration: Calibration) -> None:
    inside = Operation("conv", batch=8, in_channels=64, out_channels=64, size=(56, 56), kernel=(3, 3), padding=(1, 1))
    outside = replace(inside, kernel=(999, 999), padding=(499, 499))
    larger = replace(inside, batch=1 << 20)
    unknown = Operation("softmax", batch=10, in_channels=100)
    near, far, other = calibration.predict([inside, outside, unknown])
    assert (near.trust, far.trust, other.trust) == ("measured range", "extrapolated", "roofline")
    assert near.dispatch_s == 7e-6
    (more,) = calibration.predict([larger])
    assert more.trust == "extrapolated"
    assert more.efficiency == pytest.approx(0.8, rel=0.2)
    median = calibration.models["conv/forward"].median
    assert far.efficiency == pytest.approx(median, rel=0.3)
    assert far.high_s / far.time_s > near.high_s / near.time_s
    assert near.time_s == pytest.approx(invented(inside).median_s, rel=0.5)


def test_saved_and_loaded_predictions_are_identical(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json.gz"
    calibration.save(tmp_path / "calibration.json")
    calibration.save(path)
    loaded = Calibration.load(path)
    operations = wild(20)
    assert loaded.predict(operations) == calibration.predict(operations)
    assert Calibration.load(tmp_path / "calibration.json").predict(operations) == calibration.predict(operations)
    assert loaded.errors() == calibration.errors()
    assert loaded.to_json() == calibration.to_json()


@pytest.mark.parametrize("method", METHODS)
def test_each_regression_learns_and_reads_back_identical(method: str) -> None:
    ceiling = Ceiling(1e13, 1e12, 1e-6, 80)
    operations = list(itertools.islice(sweep(DEVICE, dtype="fp32", kinds=["conv"]), 120))
    rows = features(operations, ceiling)
    assert rows.shape == (120, len(NAMES)) and np.isfinite(rows).all()
    targets = -1 - 0.1 * rows[:, 0] / 10 + 0.05 * rows[:, 4]
    fitted = fit_regression(method, rows, targets)
    again = regression_from_json(json.loads(json.dumps(fitted.to_json())))
    np.testing.assert_array_equal(fitted.predict(rows), again.predict(rows))
    assert np.abs(fitted.predict(rows) - targets).mean() < 0.5 * targets.std()


def test_held_out_errors_are_stored_and_the_best_method_chosen(calibration: Calibration) -> None:
    for name, model in calibration.models.items():
        print(name, model.samples, model.method, model.errors)
        tried = {key: error for key, error in model.errors.items() if key.startswith("median of")}
        assert model.errors["median"] <= min(tried.values()) / 0.9
        assert 0 <= model.errors["median"] <= model.errors["p90"]


def test_a_calibration_can_be_carried_to_another_device(calibration: Calibration) -> None:
    operations = [o for o in wild(10) if o.kind == "conv"]
    twice = replace(DEVICE, name="twice", rates={"fp32": 2e13}, bandwidth_bytes_per_s=2e12)
    for slow, fast in zip(calibration.predict(operations), calibration.scaled(twice).predict(operations), strict=True):
        assert fast.trust == "scaled" and fast.roofline_s <= slow.roofline_s


def test_what_does_not_fit_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="fp32 calibration predicts only fp32"):
        calibration.predict([Operation("linear", dtype="bf16")])
    document = calibration.to_json()
    for change, message in (
        ({"version": 0}, "version is 0"),
        ({"features": ["x"]}, "other features"),
        ({"models": {"conv/forward": {}}}, r"models.conv/forward.ceiling is not there"),
    ):
        with pytest.raises(MachineError, match=message):
            Calibration.from_json({**document, **change})
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MachineError, match="not JSON"):
        Calibration.load(tmp_path / "bad.json")


def test_shipped_calibrations_are_small_complete_and_plausible() -> None:
    from importlib import resources

    folder = resources.files("outcore.cost").joinpath("calibrations")
    files = [file for file in folder.iterdir() if file.name.endswith(".json.gz")]
    assert {"nvidia-h200-tf32.json.gz", "nvidia-h200-bf16.json.gz"} <= {file.name for file in files}
    for file in files:
        assert len(file.read_bytes()) < 1_200_000
    for dtype in ("tf32", "bf16"):
        shipped = Calibration.shipped("NVIDIA H200", dtype)
        assert shipped is not None and shipped.about["torch"]
        conv = Operation(
            "conv",
            batch=32,
            in_channels=64,
            out_channels=64,
            size=(56, 56),
            kernel=(3, 3),
            padding=(1, 1),
            dtype=dtype,
            channels_last=True,
        )
        forward, backward = shipped.predict([conv, conv.backward()])
        assert forward.trust == backward.trust == "measured range"
        assert 20e-6 < forward.time_s < backward.time_s < 2e-3
        assert forward.time_s > Ceiling.of(find("h200").device, dtype).time_s(conv)


def test_the_shipped_calibration_is_found_beside_a_small_one_of_the_user(
    calibration: Calibration, tmp_path: Path
) -> None:
    calibration.save(tmp_path / "nvidia-h200-tf32.json.gz")
    found = Calibration.find("NVIDIA H200", "tf32", cache=tmp_path)
    assert found is not None and found.device == "NVIDIA H200"
    assert Calibration.find("abacus", "fp32", cache=tmp_path) is None


def test_one_slow_sample_does_not_speak_for_its_kind() -> None:
    """A first layer that was measured once, a thousand times too slow, as the first operation on a machine can be."""
    operations = itertools.islice(sweep(DEVICE, dtype="fp32", kinds=["conv"]), 140)
    first = Operation("conv", batch=1, in_channels=3, out_channels=8, size=(512, 512), kernel=(4, 4), stride=(4, 4))
    slow = TimedRuns.of([1000 * invented(first).median_s] * 3)
    samples = [Sample(o, invented(o)) for o in operations if o.family != "first" and o.direction == "forward"]
    fitted = fit_calibration([*samples, Sample(first, slow)], DEVICE, "fp32", methods=("polynomial",))
    assert "first/forward" not in fitted.models and "conv/forward" in fitted.models
    (found,) = fitted.predict([first])
    assert found.time_s < 5 * invented(first).median_s


def _start_and_rate(operation: Operation) -> TimedRuns:
    """A processor on which every operation has a start, and then runs at a third of its rates."""
    start_s = 8e-6 if operation.direction == "forward" else 30e-6
    work_s = PROCESSOR.roofline_s(flops=operation.flops, nbytes=operation.nbytes, dtype="fp32")
    noise = 1 + 0.2 * random.Random(str(operation)).random()
    return TimedRuns.of([noise * (start_s + 3 * work_s)] * 3)


PROCESSOR = Device("a processor", "cpu", 16 << 30, 2e10, {"fp32": 1e11}, sms=2, dispatch_s=3e-6)
_IMAGE = {"in_channels": 8, "size": (8, 8)}
_SMALL = [
    Operation("linear", batch=16, in_channels=64),
    Operation("elementwise", **_IMAGE, variant="relu"),
    Operation("conv", **_IMAGE, out_channels=8, kernel=(3, 3), padding=(1, 1)),
    Operation("conv_transpose", **_IMAGE, out_channels=8, kernel=(2, 2), stride=(2, 2)),
    Operation("pool", **_IMAGE, kernel=(2, 2), stride=(2, 2), variant="max"),
    Operation("norm", **_IMAGE, variant="batch"),
    Operation("softmax", batch=4, in_channels=10),
    Operation("embedding", batch=4, in_channels=1000, out_channels=64),
    Operation("matmul", batch=4, in_channels=16, out_channels=16, size=(16,)),
    Operation("attention", batch=2, in_channels=32, size=(16, 16), groups=4),
]
_LARGE = [
    replace(o, batch=64 * o.batch, size=(64, 64) if len(o.size) == 2 and o.kind != "attention" else o.size)
    for o in _SMALL
]


@pytest.mark.parametrize("samples", [0, 3, 12, 40, 80, pytest.param(200, marks=pytest.mark.slow)])
def test_however_short_a_calibration_makes_no_prediction_worse(samples: int) -> None:
    """Every kind, small and large, forward and backward: nearer to the truth, or within a factor of two."""
    taken = [Sample(o, _start_and_rate(o)) for o in itertools.islice(sweep(PROCESSOR, dtype="fp32"), samples)]
    fitted = fit_calibration(taken, PROCESSOR, "fp32", methods=("polynomial",))
    nothing = fit_calibration([], PROCESSOR, "fp32")
    operations = [o for each in (*_SMALL, *_LARGE) for o in (each, each.backward())]
    rows = zip(operations, fitted.predict(operations), nothing.predict(operations), strict=True)
    for operation, found, without in rows:
        true_s = _start_and_rate(operation).median_s
        off, off_before = (abs(math.log(p.time_s / true_s)) for p in (found, without))
        assert off < max(math.log(2.0), off_before + 1e-9), (str(operation), found, true_s)


def test_the_smallest_operations_of_every_kind_are_measured_first() -> None:
    first = list(itertools.islice(sweep(PROCESSOR, dtype="fp32"), 32))
    assert {o.kind for o in first} == set(KINDS)
    assert all(_start_and_rate(o).median_s < 60e-6 for o in first)


def test_no_kind_waits_for_the_others() -> None:
    """Of a hundred operations after the smallest, every kind has had about its share."""
    drawn = [o.kind for o in itertools.islice(sweep(PROCESSOR, dtype="fp32"), 32, 132)]
    assert set(drawn) == set(KINDS)


def test_calibrating_keeps_samples_and_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("here", "cpu", 1 << 28, 1e10, {"fp32": 2e10}, sms=1, dispatch_s=2e-6)
    (fitted,) = calibrate(device, "cpu", dtypes=["fp32"], seconds=0.2, cache=tmp_path)
    assert bool(fitted.models) == (Calibration.find("here", "fp32", cache=tmp_path) is not None)
    monkeypatch.setattr(calibration_module, "LEAST", 1)
    for seconds in (0.3, 0.2):
        (fitted,) = calibrate(device, "cpu", dtypes=["fp32"], seconds=seconds, cache=tmp_path)
    found = Calibration.find("here", "fp32", cache=tmp_path)
    assert found is not None and found.errors() == fitted.errors()
    assert {path.name for path in tmp_path.iterdir()} == {"here-fp32.jsonl", "here-fp32.json.gz"}


def test_a_small_real_sweep_can_be_fitted(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = Device("here", "cpu", 8 << 30, 1e10, {"fp32": 2e10}, sms=1, dispatch_s=2e-6)
        path = tmp_path / "samples.jsonl"
        samples = collect(device, "cpu", dtype="fp32", path=path, seconds=2, kinds=["linear", "elementwise"])
    finally:
        torch.set_num_threads(threads)
    assert samples
    fitted = fit_calibration(samples, device, "fp32", methods=("polynomial",))
    for name, (count, method, median, p90) in fitted.errors().items():
        print(f"{name}: {count} samples, {method}, held-out error median {median:.0%}, p90 {p90:.0%}")
    predictions = fitted.predict([sample.operation for sample in samples])
    assert all(0 < prediction.efficiency <= 1 for prediction in predictions)


def test_a_shape_for_which_the_library_is_slow_does_not_spoil_its_neighbours() -> None:
    source = np.random.default_rng(0)
    rows = source.uniform(-1, 1, (150, 3))
    odd = source.permutation(150)[:12]
    targets = _smooth(rows)
    targets[odd] -= np.log(10)
    fitted = fit_regression("gaussian", rows, targets)
    fresh = source.uniform(-0.8, 0.8, (200, 3))
    assert np.percentile(np.abs(fitted.predict(fresh) - _smooth(fresh)), 90) < 0.1


def _smooth(rows: Matrix) -> Matrix:
    return np.asarray(np.sin(2 * rows[:, 0]) / 2 - np.cos(2 * rows[:, 1]) / 3 - 1.5)


def test_of_two_calibrations_the_one_of_more_samples_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = list(itertools.islice(sweep(DEVICE, dtype="fp32", kinds=["linear"]), 60))
    few, many = (
        fit_calibration([Sample(o, invented(o)) for o in operations[:n]], DEVICE, "fp32", methods=("polynomial",))
        for n in (24, 60)
    )
    for own, shipped, wanted in ((few, many, many), (many, few, many), (many, None, many)):
        own.save(tmp_path / file_name(DEVICE.name, "fp32"))
        monkeypatch.setattr(calibration_module, "_shipped", lambda _, shipped=shipped: shipped)
        found = Calibration.find(DEVICE.name, "fp32", cache=tmp_path)
        assert found is not None and found.samples == wanted.samples
