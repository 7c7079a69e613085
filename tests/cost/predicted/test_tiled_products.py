"""The time of the products that a layer becomes: forward one, backward one for each gradient that is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.cost.predicted.features import _tiled_s
from outcore.cost.predicted.operation import Operation
from outcore.cost.predicted.roofline import Ceiling

CEILING = Ceiling(1e12, 1e11, 1e-6, sms=80)
CONV = Operation("conv", batch=8, in_channels=64, out_channels=128, size=(32, 32), kernel=(3, 3), padding=(1, 1))


def seconds(**changes: object) -> float:
    return _tiled_s(replace(CONV, **changes), 64, 128, 9, CEILING)  # type: ignore[arg-type]


def test_backward_is_the_sum_of_the_gradients_that_are_asked_for() -> None:
    both = seconds(direction="backward")
    of_input = seconds(direction="backward", weight_grad=False)
    of_weight = seconds(direction="backward", input_grad=False)
    assert min(of_input, of_weight) > 0 and both == pytest.approx(of_input + of_weight)
    assert seconds(direction="backward", weight_grad=False, input_grad=False) == pytest.approx(0.0, abs=1e-11)
    # As many operations as forward, in whole tiles on whole waves: no less than at the full rate.
    for found in (seconds(), of_input, of_weight):
        assert found >= 0.9 * CONV.flops / CEILING.flops_per_s


def test_twice_the_batch_takes_about_twice_as_long_and_groups_are_products_of_their_own() -> None:
    assert 1.5 < seconds(batch=64) / seconds(batch=32) < 2.5
    grouped = replace(CONV, groups=2)
    assert _tiled_s(grouped, 32, 64, 9, CEILING) < seconds()
