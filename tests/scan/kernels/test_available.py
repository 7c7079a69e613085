"""The kernels on Triton's interpreter: `make kernels`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from outcore.scan import Newton, Options
from outcore.scan.kernels import available, backward, backward_sizes, forward
from tests.foreign.sample import one_in
from tests.scan.oracle import everything, initial, largest_error, pair

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not available.available(torch.zeros(1)), reason="needs Triton and TRITON_INTERPRET=1 (make kernels)"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]


CELLS = [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {})]
WAYS = [("products", None), (None, Newton(tolerance=1e-12))]


@pytest.mark.parametrize(("cell", "way", "lengths"), one_in(2, product(CELLS, WAYS, [None, [40, 7, 20]])))
def test_gradients_equal_torchs(
    cell: tuple[str, dict[str, Any]], way: tuple[Any, Newton | None], lengths: list[int] | None
) -> None:
    options = Options(backward="scan", solver=way[0], chunk=20, forward=way[1])
    reference, ours = pair(cell[0], 4, 5, options, **cell[1])
    x, state = torch.randn(40, 3, 4, dtype=torch.float64), initial(ours, 3)
    assert largest_error(everything(reference, x, state, lengths), everything(ours, x, state, lengths)) < 1e-9
    assert ours.report.layers[0].engine == "triton"


@pytest.mark.parametrize("looking", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_does_not_fade_is_multiplied_out_and_run_sequentially(
    looking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (backward, forward):
        monkeypatch.setattr(module, "device_waits", lambda x: looking)
    monkeypatch.setitem(backward_sizes.WARM_UPS, "gru", (4, 8))
    reference, ours = pair("GRU", 4, 5, Options(backward="scan", chunk=20, forward=Newton(tolerance=1e-12)))
    x, state = torch.randn(60, 2, 4, dtype=torch.float64), initial(ours, 2)
    assert largest_error(everything(reference, x, state), everything(ours, x, state)) < 1e-9
    layer = ours.report.layers[0]
    assert (layer.solvers, layer.sweeps) == (["products"], 3)
    assert ("longest warm-up" in layer.fell_back) == (not looking)


@pytest.mark.parametrize(
    ("solver", "inputs", "hidden"),
    [
        *one_in(2, [(solver, inputs, 20) for solver in (None, "products") for inputs in (1, 20)]),
        *(pytest.param(solver, 3, 40, marks=pytest.mark.slow) for solver in (None, "products")),
    ],
)
def test_weights_gradients_are_summed_up_where_the_inputs_are_not_asked_for(
    solver: Any, inputs: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backward_sizes.PROGRAMS, "tanh", 4)
    reference, ours = pair("RNN", inputs, hidden, Options(backward="scan", solver=solver, chunk=20))
    x, weight = torch.randn(50, 17, inputs, dtype=torch.float64), torch.randn(50, 17, hidden, dtype=torch.float64)
    grads = [torch.autograd.grad((m(x)[0] * weight).sum(), list(m.parameters())) for m in (reference, ours)]
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert ours.report.layers[0].engine == "triton"


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_both_directions_and_rows_of_several_programs(cell: str) -> None:
    reference, ours = pair(cell, 4, 5, Options(backward="scan", solver="products", chunk=20), bidirectional=True)
    x, state = torch.randn(40, 5, 4, dtype=torch.float64), initial(ours, 5)
    assert largest_error(everything(reference, x, state), everything(ours, x, state)) < 1e-9
    assert ours.report.layers[0].engine == "triton"
