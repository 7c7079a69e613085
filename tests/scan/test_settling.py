"""When a relaxation is over: the carries change by no more than rounding does, and the result says so."""

from __future__ import annotations

import pytest
import torch

from outcore.scan import Options
from outcore.scan.backward import _change, will_settle
from tests.scan.oracle import everything, initial, largest_error, pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_change_is_counted_in_four_units_of_the_last_place(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    size = torch.tensor([1.0, 0.25, 1e-3], dtype=dtype)
    for ulps in (0.0, 1.0, 4.0, 12.0, 4000.0):
        assert _change(ulps * eps * size, size) == pytest.approx(ulps / 4, rel=1e-2)
    one_of_them = torch.tensor([0.0, 8 * eps * 0.25, 0.0], dtype=dtype)
    assert _change(one_of_them, size) == pytest.approx(2.0, rel=1e-2)
    nothing = torch.tensor([1.0, 1e-3 * eps**2], dtype=dtype)
    assert _change(torch.stack([torch.zeros((), dtype=dtype), nothing[1]]), nothing) <= 1
    assert _change(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)) == 0


def test_sweeps_go_on_while_the_change_falls_fast_enough() -> None:
    assert will_settle(float("inf"), 1e6, 1, 3) and not will_settle(float("inf"), float("inf"), 1, 3)
    assert will_settle(1e6, 1e4, 1, 2)  # a hundredth each: two sweeps more
    assert not will_settle(1e6, 1e4, 1, 1)
    assert not will_settle(1e6, 1e6, 1, 100) and not will_settle(1e4, 1e6, 1, 100)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_relaxation_ends_within_rounding(kind: str) -> None:
    reference, ours = pair(kind, 4, 5, Options(backward="scan", solver="relaxation", chunk=8))
    x, state = torch.randn(160, 2, 4, dtype=torch.float64), initial(ours, 2)
    assert largest_error(everything(reference, x, state), everything(ours, x, state)) < 1e-14
    layer = ours.report.layers[0]
    assert layer.solvers == ["relaxation"] and 1 < layer.sweeps < 20
