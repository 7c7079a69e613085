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


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize(("solver", "newton"), [("products", None), (None, Newton())])
def test_float32_is_as_close_to_float64_as_rounding_allows(
    kind: str, solver: Any, newton: Newton | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact, ours = pair(kind, 20, 20, Options(backward="scan", solver=solver, forward=newton), device="cuda")
    x = torch.randn(1000, 20, 20, dtype=torch.float64, device="cuda")
    expected = everything(exact, x)
    found = everything(ours.float(), x.float())
    assert largest_error(expected, {name: part.double() for name, part in found.items()}) < 2e-5
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


def recorded(module: Any, x: torch.Tensor, state: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Gradients of the parameters from a CUDA graph of forward and backward, replayed on other data than recorded."""
    given = torch.randn_like(x)

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(module(given, state)[0][:, :, 2:].sum(), list(module.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grads()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grads()
    given.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return {name: grad for (name, _), grad in zip(module.named_parameters(), found, strict=True)}


def from_cudnn(module: Any, x: torch.Tensor, state: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(module(x, state)[0][:, :, 2:].sum(), list(module.parameters()))
    return {name: grad for (name, _), grad in zip(module.named_parameters(), grads, strict=True)}


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("newton", [None, Newton(tolerance=1e-12)])
def test_both_passes_are_recorded_in_a_cuda_graph(kind: str, newton: Newton | None) -> None:
    reference, ours = pair(kind, 5, 20, Options(backward="scan", forward=newton), device="cuda")
    x = torch.randn(1500, 3, 5, dtype=torch.float64, device="cuda")
    assert largest_error(from_cudnn(reference, x), recorded(ours, x)) < 1e-9
    layer = ours.report.layers[0]
    assert layer.solvers == ["relaxation"]
    assert layer.fell_back == ""
    assert (layer.forward is None) == (newton is None)


def test_a_recorded_pass_turns_to_products_and_to_a_sequential_sweep_where_gradients_do_not_fade() -> None:
    options = Options(backward="scan", forward=Newton(tolerance=1e-12))
    reference, ours = pair("GRU", 5, 20, options, device="cuda")
    with torch.no_grad():
        for module in (reference, ours):
            module.bias_ih_l0[20:40] += 8  # the update gate keeps almost everything
    x = torch.randn(1500, 3, 5, dtype=torch.float64, device="cuda")
    assert largest_error(from_cudnn(reference, x), recorded(ours, x)) < 1e-9
    layer = ours.report.layers[0]
    assert layer.solvers == ["products"]
    assert "after the longest warm-up" in layer.fell_back


def test_a_recorded_pass_whose_products_overflow_is_sequential() -> None:
    options = Options(backward="scan", solver="products", chunk=64)
    reference, ours = pair("RNN", 2, 4, options, nonlinearity="relu", dtype=torch.float32, device="cuda")
    with torch.no_grad():
        for module in (reference, ours):
            # Units 0 and 1 stand still, 20 * 1 - 19, where their Jacobian is 20; no gradient reaches them.
            module.weight_hh_l0.copy_(torch.diag(torch.tensor([20.0, 20.0, 0.5, 0.5])))
            module.weight_ih_l0.abs_()[:2] = 0
            module.bias_ih_l0.copy_(torch.tensor([-19.0, -19.0, 0.1, 0.1]))
            module.bias_hh_l0.zero_()
    x, state = torch.rand(128, 1, 2, device="cuda"), torch.tensor([[[1.0, 1.0, 0.0, 0.0]]], device="cuda")
    for name, grad in from_cudnn(reference, x, state).items():
        torch.testing.assert_close(recorded(ours, x, state)[name], grad, rtol=1e-3, atol=1e-3)
    assert ours.report.layers[0].solvers == ["sequential"]


@pytest.mark.alone
def test_a_busy_device_is_not_waited_for() -> None:
    reference, ours = pair("LSTM", 5, 20, Options(backward="scan", forward=Newton(tolerance=1e-12)), device="cuda")
    x = torch.randn(1500, 3, 5, dtype=torch.float64, device="cuda")
    expected = everything(reference, x)
    for _ in range(6):  # kernels that are compiled are loaded, for which the device is waited for
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000_000)
        found = everything(ours, x)
        if not (known := ours.report.layers[0].outcomes[0].known):
            break
    assert not known
    assert largest_error(expected, found) < 1e-9
    assert ours.report.layers[0].solvers == ["relaxation"]


@pytest.mark.parametrize(("kind", "inputs"), [("RNN", 1), ("RNN", 20), ("GRU", 20), ("LSTM", 20)])
def test_peak_is_as_predicted(kind: str, inputs: int) -> None:
    options = Options(backward="scan", solver="products")
    _, ours = pair(kind, inputs, 20, options, dtype=torch.float32, device="cuda")
    x = torch.randn(10000, 16, inputs, device="cuda", requires_grad=True)
    for _ in range(2):  # the first takes what cuBLAS keeps
        output, _ = ours(x)
        ones = torch.ones_like(output)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        torch.autograd.grad(output, [x, *ours.parameters()], ones)
        peak = torch.cuda.max_memory_allocated() - held
    predicted = ours.report.layers[0].predicted_bytes
    print(f"predicted {predicted:,}, counted {peak:,}, {predicted / peak - 1:+.1%}")
    assert peak <= predicted <= 1.35 * peak
