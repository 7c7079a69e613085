"""The kernels on a GPU: every cell, both precisions, packed sequences, the parallel forward pass, the recurrences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.scan import Newton, Options, chain, linear_recurrence
from tests.scan.oracle import everything, largest_error, pair
from tests.scan.test_linear import loop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("kind", "extra"), [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {})])
@pytest.mark.parametrize("solver", ["products", "relaxation"])
@pytest.mark.parametrize("lengths", [None, [777, 20, 400]])
@pytest.mark.parametrize("newton", [None, Newton()])
@pytest.mark.filterwarnings("ignore:the parallel forward pass ran sequentially")  # as a relu of growing states does
def test_gradients_of_the_kernels_equal_cudnns_in_float64(
    kind: str, extra: dict[str, Any], solver: Any, lengths: list[int] | None, newton: Newton | None
) -> None:
    options = Options(backward="scan", solver=solver, forward=newton)
    reference, ours = pair(kind, 5, 20, options, num_layers=2, bidirectional=True, device="cuda", **extra)
    x = torch.randn(777, 3, 5, dtype=torch.float64, device="cuda")
    assert largest_error(everything(reference, x, None, lengths), everything(ours, x, None, lengths)) < 1e-9
    assert ours.report.layers[0].engine == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_recurrence_equals_a_loop(dtype: torch.dtype, reverse: bool) -> None:
    a, b = torch.randn(3000, 5, dtype=dtype, device="cuda"), torch.randn(3000, 5, dtype=dtype, device="cuda")
    a, start = a / a.abs().clamp(min=1), torch.randn(5, dtype=dtype, device="cuda")
    tolerance = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-10
    torch.testing.assert_close(
        linear_recurrence(a, b, start, reverse=reverse), loop(a, b, start, reverse), rtol=tolerance, atol=tolerance
    )


def test_chain_equals_multiplying_one_by_one() -> None:
    jacobians = torch.randn(1000, 4, 8, 8, dtype=torch.float64, device="cuda") / 3
    gradient = torch.randn(4, 8, dtype=torch.float64, device="cuda")
    found = chain(jacobians, gradient)
    torch.testing.assert_close(found, chain(jacobians, gradient, levels=0))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of make_graphed_callables itself
def test_backward_pass_is_recorded_in_a_cuda_graph() -> None:
    reference, ours = pair("GRU", 5, 20, device="cuda", dtype=torch.float32)
    x = torch.randn(500, 3, 5, device="cuda")
    step = torch.cuda.make_graphed_callables(ours, (x,))
    step(x)[0].sum().backward()
    reference(x)[0].sum().backward()
    torch.testing.assert_close(ours.weight_hh_l0.grad, reference.weight_hh_l0.grad, rtol=1e-2, atol=1e-2)
