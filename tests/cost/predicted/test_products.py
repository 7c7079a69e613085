"""The backward pass of a convolution is two products, measured apart or together; what each tells of the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outcore.cost import Calibration, Ceiling, Operation, Sample
from outcore.cost.predicted.calibration import training_samples
from outcore.cost.predicted.features import NAMES
from outcore.machine.clock import TimedRuns

BASE = Ceiling(1e13, 1e12, 0.0, 80)
CONV = Operation("conv", 8, 64, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1)).backward()
WEIGHT, INPUT = replace(CONV, input_grad=False), replace(CONV, weight_grad=False)


def runs(*times: float) -> TimedRuns:
    return TimedRuns.of(times, dispatch_s=7e-6)


def test_two_products_that_were_measured_apart_are_a_backward_pass() -> None:
    samples = [Sample(WEIGHT, runs(1.0, 2.0, 6.0)), Sample(INPUT, runs(0.5, 1.0, 1.5, 2.0, 2.5))]
    (both,) = training_samples(samples, BASE, "dense", "backward")
    assert both.operation == CONV
    assert (both.timing.min_s, both.timing.median_s, both.timing.max_s) == (1.5, 3.5, 8.5)
    assert both.timing.mean_s == 3 + 1.5 and both.timing.runs == 3
    assert both.timing.dispatch_s == 7e-6


def test_the_products_of_two_convolutions_are_not_one_pass() -> None:
    other = replace(INPUT, batch=4)
    assert training_samples([Sample(WEIGHT, runs(1.0)), Sample(other, runs(1.0))], BASE, "dense", "backward") == []
    alone = training_samples([Sample(WEIGHT, runs(1.0))], BASE, "dense", "weight")
    assert [s.operation for s in alone] == [WEIGHT]


def test_what_is_faster_than_any_cache_is_not_learned_from() -> None:
    fastest_s = CONV.nbytes / BASE.bytes_per_s / 8
    found = [
        training_samples([Sample(CONV, runs(s))], BASE, "dense", "backward") for s in (0.9 * fastest_s, 1.1 * fastest_s)
    ]
    assert [len(one) for one in found] == [0, 1]


class Efficiencies(SimpleNamespace):
    """A model that gives one efficiency for all."""

    def predict(self, operations: Sequence[Operation]) -> tuple[Any, Any]:
        return np.full(len(operations), self.median), np.zeros(len(operations))


def model(efficiency: float, *, error: float = 0.1, biased: bool = False) -> Any:
    low = np.zeros(len(NAMES))
    low[NAMES.index("bias")] = float(biased)
    return Efficiencies(
        median=efficiency, rate=0.0, errors={"median": error}, low=low, ceiling=BASE, spread=(0.9, 1.2), dispatch_s=0.0
    )


def calibration(**models: Any) -> Calibration:
    return Calibration("a card", "fp32", BASE, {name.replace("_", "/"): one for name, one in models.items()}, {})


def test_both_ways_to_predict_a_backward_pass_are_averaged() -> None:
    whole, parts = calibration(conv_backward=model(0.5)), {"conv_weight": model(0.25), "conv_input": model(0.125)}
    (plain,) = whole.predict([CONV])
    (joined,) = calibration(conv_backward=model(0.5), **parts).predict([CONV])
    bias_s = CONV.out_elements * 4 / BASE.bytes_per_s
    apart_s = BASE.time_s(WEIGHT) / 0.25 + BASE.time_s(INPUT) / 0.125 + bias_s
    assert joined.time_s == pytest.approx(math.sqrt(plain.time_s * apart_s))
    assert joined.low_s / joined.time_s == pytest.approx(plain.low_s / plain.time_s)
    assert joined.high_s / joined.time_s == pytest.approx(plain.high_s / plain.time_s)


@pytest.mark.parametrize("missing", ["conv_weight", "conv_input"])
def test_products_that_are_known_less_well_or_not_at_all_are_not_asked(missing: str) -> None:
    parts = {"conv_weight": model(0.25), "conv_input": model(0.125)}
    alone = calibration(conv_backward=model(0.5)).predict([CONV])
    worse = parts | {missing: model(0.25, error=0.11)}
    assert calibration(conv_backward=model(0.5), **worse).predict([CONV]) == alone
    del parts[missing]
    assert calibration(conv_backward=model(0.5), **parts).predict([CONV]) == alone


@pytest.mark.parametrize(("direction", "passes"), [("forward", 2), ("backward", 1)])
def test_a_model_that_saw_only_biases_subtracts_the_pass_for_them(direction: Any, passes: int) -> None:
    """A bias is read and written over the output in forward; its gradient is read."""
    biased = replace(CONV, direction=direction)
    known = calibration(**{f"conv_{direction}": model(0.25, biased=True)})
    with_bias, without = known.predict([biased, replace(biased, bias=False)])
    pass_s = passes * CONV.out_elements * 4 / BASE.bytes_per_s
    assert with_bias.time_s - without.time_s == pytest.approx(pass_s)
    exact = calibration(**{f"conv_{direction}": model(1.0, biased=True)}).predict([replace(biased, bias=False)])[0]
    assert exact.time_s == exact.roofline_s, "never below the roofline"


def test_without_a_model_the_roofline_is_divided_by_the_middle_efficiency() -> None:
    linear = Operation("linear", 100, 64, 32)
    (found,) = calibration(conv_forward=model(0.2), conv_backward=model(0.5), norm_forward=model(0.4)).predict([linear])
    assert found.trust == "roofline" and found.efficiency == 0.4
    assert found.time_s == pytest.approx(BASE.time_s(linear) / 0.4)
    assert found.low_s <= found.time_s <= found.high_s
