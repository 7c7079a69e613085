"""The parallel forward pass: to its tolerance, reported, and sequential when it does not converge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.errors import ScanError
from outcore.scan import Newton, Options
from tests.scan.oracle import everything, initial, largest_error, pair

CELLS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu"}),
    ("GRU", {}),
    ("LSTM", {}),
]


def options(**newton: Any) -> Options:
    return Options(backward="scan", forward=Newton(**newton))


@pytest.mark.parametrize(("kind", "extra"), CELLS)
@pytest.mark.parametrize("jacobian", [None, "full", "diagonal", "none"])
@pytest.mark.parametrize("lengths", [None, [61, 7, 50]])
def test_states_and_gradients_to_the_tolerance(
    kind: str, extra: dict[str, Any], jacobian: Any, lengths: list[int] | None
) -> None:
    reference, ours = pair(
        kind, 4, 5, options(jacobian=jacobian, tolerance=1e-11), num_layers=2, bidirectional=True, **extra
    )
    x = torch.randn(61, 3, 4, dtype=torch.float64)
    state = initial(ours, 3)
    expected, found = everything(reference, x, state, lengths), everything(ours, x, state, lengths)
    assert largest_error(expected, found) < 1e-9
    for layer in ours.report.layers:
        assert 0 < layer.iterations <= 16
        assert layer.correction <= 1e-11
        assert not layer.fell_back


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_chunks_of_one_step_are_deer(kind: str) -> None:
    reference, ours = pair(kind, 4, 5, options(jacobian="full", chunk=1))
    x = torch.randn(50, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        expected, found = reference(x)[0], ours(x)[0]
    assert float((expected - found).abs().max()) < 1e-9
    assert ours.report.layers[0].iterations <= 7


def test_newton_converges_quadratically_where_picard_crawls() -> None:
    x = torch.randn(300, 2, 4, dtype=torch.float64)
    needed = {}
    for jacobian in ("full", "none"):
        _, ours = pair("GRU", 4, 5, options(jacobian=jacobian, chunk=4, iterations=75))
        with torch.no_grad():
            ours(x)
        needed[jacobian] = ours.report.layers[0].iterations
    assert needed["full"] <= 6 < needed["none"]


def test_every_iteration_makes_one_more_chunk_exact_so_that_as_many_as_chunks_always_suffice() -> None:
    reference, ours = pair("RNN", 4, 6, options(jacobian="none", chunk=10, iterations=10, tolerance=1e-15))
    with torch.no_grad():
        for module in (reference, ours):
            module.weight_hh_l0.mul_(8)  # chaotic: nothing is forgotten
    x = torch.randn(100, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        assert float((reference(x)[0] - ours(x)[0]).abs().max()) < 1e-9
    assert ours.report.layers[0].iterations == 10


def test_without_convergence_the_layer_runs_sequentially_and_says_so() -> None:
    reference, ours = pair("RNN", 4, 6, options(chunk=5, iterations=3))
    with torch.no_grad():
        for module in (reference, ours):
            module.weight_hh_l0.mul_(8)
    x = torch.randn(200, 2, 4, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="no convergence in 3 iterations"):
        found = ours(x)[0]
    assert torch.equal(found, reference(x)[0])
    assert "no convergence in 3 iterations" in ours.report.layers[0].fell_back
    assert "sequential" in str(ours.report)
    ours(x)
    assert "is tried again in 64 calls" in ours.report.reason


def test_damping_still_reaches_the_same_states() -> None:
    reference, ours = pair("GRU", 4, 5, options(jacobian="full", damping=0.5, iterations=40))
    x = torch.randn(61, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        assert float((reference(x)[0] - ours(x)[0]).abs().max()) < 1e-9


def test_float32_reaches_its_own_tolerance() -> None:
    reference, ours = pair("LSTM", 4, 5, options(), dtype=torch.float32)
    x = torch.randn(500, 2, 4)
    with torch.no_grad():
        assert float((reference(x)[0] - ours(x)[0]).abs().max()) < 2e-5


def test_jacobians_that_do_not_fit_are_refused_before_the_work() -> None:
    _, ours = pair("RNN", 4, 4096, options(jacobian="full", chunk=1), dtype=torch.float32)
    with pytest.raises(ScanError, match=r"Newton\(chunk="):
        ours(torch.randn(4000, 16, 4))


@pytest.mark.parametrize(
    "wrong", [{"tolerance": 0}, {"iterations": 0}, {"jacobian": "half"}, {"damping": 2}, {"chunk": 0}]
)
def test_options_are_checked_when_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScanError, match=next(iter(wrong))):
        Newton(**wrong)
