"""The drop-in modules against torch.nn: every output and every gradient, in float64, to 1e-9."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import outcore.scan as scan
from outcore.errors import ScanError
from outcore.scan import Options
from tests.scan.oracle import SCAN, everything, initial, largest_error, pair

BOUND = 1e-9
CELLS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu"}),
    ("GRU", {}),
    ("LSTM", {}),
    ("LSTM", {"proj_size": 3}),
]
cells = pytest.mark.parametrize(("kind", "extra"), CELLS, ids=["tanh", "relu", "gru", "lstm", "lstm-projected"])
solvers = pytest.mark.parametrize("solver", ["products", "relaxation", None])


@pytest.fixture(autouse=True)
def quiet_projection() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
        yield


@cells
@solvers
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_torch_for_every_option(
    kind: str, extra: dict[str, Any], solver: Any, bias: bool, layers: int, bidirectional: bool
) -> None:
    options = Options(backward="scan", solver=solver)
    more = {"bias": bias, "num_layers": layers, "bidirectional": bidirectional, **extra}
    reference, ours = pair(kind, 4, 5, options, **more)
    x = torch.randn(37, 3, 4, dtype=torch.float64)
    state = initial(ours, 3)
    assert largest_error(everything(reference, x, state), everything(ours, x, state)) < BOUND
    assert ours.report.backward == "scan"


@cells
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equals_torch_on_packed_sequences(kind: str, extra: dict[str, Any], bidirectional: bool) -> None:
    reference, ours = pair(kind, 4, 5, num_layers=2, bidirectional=bidirectional, **extra)
    x = torch.randn(29, 5, 4, dtype=torch.float64)
    for lengths in ([29, 29, 29, 29, 29], [7, 29, 1, 13, 28]):
        state = initial(ours, 5)
        assert largest_error(everything(reference, x, state, lengths), everything(ours, x, state, lengths)) < BOUND
        assert largest_error(everything(reference, x, None, lengths), everything(ours, x, None, lengths)) < BOUND


@cells
def test_dropout_between_layers_draws_the_same_masks(kind: str, extra: dict[str, Any]) -> None:
    reference, ours = pair(kind, 4, 5, num_layers=3, dropout=0.4, **extra)
    x = torch.randn(20, 3, 4, dtype=torch.float64)
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND
    assert largest_error(everything(reference, x, None, [20, 3, 11]), everything(ours, x, None, [20, 3, 11])) < BOUND
    reference.eval()
    ours.eval()
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND


@cells
@pytest.mark.parametrize("batch_first", [False, True])
def test_equals_torch_with_batch_first_and_without_a_batch(kind: str, extra: dict[str, Any], batch_first: bool) -> None:
    reference, ours = pair(kind, 4, 5, batch_first=batch_first, bidirectional=True, **extra)
    x = torch.randn(3, 17, 4, dtype=torch.float64)
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND
    alone = torch.randn(17, 4, dtype=torch.float64)
    state = initial(ours, None)
    assert largest_error(everything(reference, alone, state), everything(ours, alone, state)) < BOUND
    assert largest_error(everything(reference, alone), everything(ours, alone)) < BOUND


@cells
@pytest.mark.parametrize("steps", [1, 2, 3, 31, 32, 33, 250])
@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
def test_any_length_and_any_chunk(kind: str, extra: dict[str, Any], steps: int, chunk: int | None) -> None:
    reference, ours = pair(kind, 2, 5, Options(backward="scan", solver="products", chunk=chunk), **extra)
    x = torch.randn(steps, 2, 2, dtype=torch.float64)
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("hidden", [1, 2, 33, 128])
def test_any_hidden_size(kind: str, hidden: int) -> None:
    reference, ours = pair(kind, 3, hidden, Options(backward="scan", solver="products"))
    x = torch.randn(19, 2, 3, dtype=torch.float64)
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "hidden"),
    [("RNN", 30_000, 20), ("GRU", 10_000, 20), ("LSTM", 5_000, 16), ("RNN", 300, 512), ("GRU", 100, 512),
     ("LSTM", 60, 256), ("LSTM", 40, 512)],
)  # fmt: skip
@solvers
def test_long_sequences_and_large_states(kind: str, steps: int, hidden: int, solver: Any) -> None:
    reference, ours = pair(kind, 2, hidden, Options(backward="scan", solver=solver))
    x = torch.randn(steps, 2, 2, dtype=torch.float64)
    assert largest_error(everything(reference, x), everything(ours, x)) < BOUND


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@solvers
def test_float32_over_a_long_sequence_is_as_close_to_float64_as_torch_is(kind: str, solver: Any) -> None:
    exact, _ = pair(kind, 2, 8)
    reference, ours = pair(kind, 2, 8, Options(backward="scan", solver=solver), dtype=torch.float32)
    x = torch.randn(2000, 2, 2, dtype=torch.float64)
    expected = everything(exact.load_state_dict(reference.state_dict()) and exact, x)
    theirs = largest_error(expected, everything(reference, x.float()))
    mine = largest_error(expected, everything(ours, x.float()))
    assert mine < max(10 * theirs, 2e-5)


def test_explosive_recurrence_whose_products_overflow_still_gives_torchs_gradients() -> None:
    options = Options(backward="scan", solver="products", chunk=64)
    reference, ours = pair("RNN", 2, 4, options, nonlinearity="relu", dtype=torch.float32)
    with torch.no_grad():
        for module in (reference, ours):
            # Units 0 and 1 stand still, 20 * 1 - 19, where their Jacobian is 20; no gradient reaches them.
            module.weight_hh_l0.copy_(torch.diag(torch.tensor([20.0, 20.0, 0.5, 0.5])))
            module.weight_ih_l0.abs_()[:2] = 0
            module.bias_ih_l0.copy_(torch.tensor([-19.0, -19.0, 0.1, 0.1]))
            module.bias_hh_l0.zero_()
    x, state = torch.rand(128, 1, 2), torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])

    def grads(module: nn.Module) -> tuple[torch.Tensor, ...]:
        output, _ = module(x, state)
        return torch.autograd.grad(output[:, :, 2:].sum(), list(module.parameters()))

    assert torch.isfinite(reference(x, state)[0]).all()
    for a, b in zip(grads(reference), grads(ours), strict=True):
        torch.testing.assert_close(a, b)
    assert ours.report.layers[0].solvers == ["sequential"]


def test_gradient_only_where_it_is_asked_for() -> None:
    reference, ours = pair("GRU", 4, 5)
    for module in (reference, ours):
        module.weight_hh_l0.requires_grad_(False)
        module(torch.ones(40, 2, 4, dtype=torch.float64))[1].sum().backward()
    assert ours.weight_hh_l0.grad is None
    torch.testing.assert_close(ours.weight_ih_l0.grad, reference.weight_ih_l0.grad)


def test_two_backward_passes_of_a_kept_graph_add_up() -> None:
    _, ours = pair("LSTM", 4, 5)
    output, _ = ours(torch.randn(40, 2, 4, dtype=torch.float64))
    output.sum().backward(retain_graph=True)
    once = ours.weight_hh_l0.grad.clone()
    output.sum().backward()
    torch.testing.assert_close(ours.weight_hh_l0.grad, 2 * once)


def test_double_backward_is_refused_not_wrong() -> None:
    _, ours = pair("RNN", 4, 5)
    output, _ = ours(torch.randn(40, 2, 4, dtype=torch.float64))
    with pytest.raises(ScanError, match="cannot be differentiated again"):
        torch.autograd.grad(output.sum(), [ours.weight_hh_l0], create_graph=True)


@cells
def test_is_the_torch_module_with_its_state_dict(kind: str, extra: dict[str, Any]) -> None:
    reference, ours = pair(kind, 4, 5, num_layers=2, **extra)
    assert isinstance(ours, getattr(nn, kind))
    assert list(ours.state_dict()) == list(reference.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert again.options == SCAN
    x = torch.randn(9, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(again(x)[0], reference(x)[0])


def test_without_gradients_the_call_is_torchs() -> None:
    reference, ours = pair("LSTM", 4, 5)
    x = torch.randn(50, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(ours(x)[0], reference(x)[0])
    assert (ours.report.backward, ours.report.reason) == ("torch", "nothing to differentiate")


def test_convert_keeps_parameters_and_the_results_of_a_model() -> None:
    model = nn.Sequential(nn.GRU(4, 5, dtype=torch.float64))
    before = dict(model.named_parameters())
    x = torch.randn(50, 2, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x)[0].sum(), list(model.parameters()))
    assert scan.convert(model, options=SCAN) is model
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    found = torch.autograd.grad(model(x)[0].sum(), list(model.parameters()))
    assert "scan" in str(model[0].report)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def test_convert_of_a_model_without_recurrent_layers_says_so() -> None:
    with pytest.raises(ScanError, match=r"Linear has no torch\.nn\.RNN"):
        scan.convert(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_bad_arguments_raise_what_torch_raises(kind: str) -> None:
    reference, ours = pair(kind, 4, 5)
    good = torch.randn(9, 2, 4, dtype=torch.float64)
    wrong_state: Any = torch.randn(1, 2, 6, dtype=torch.float64)
    wrong_state = (wrong_state, wrong_state) if kind == "LSTM" else wrong_state
    for arguments in ((torch.randn(9, 2, 7, dtype=torch.float64),), (good[0, 0],), (good, wrong_state), (good[:0],)):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            reference(*arguments)
        with pytest.raises(type(theirs.value)):
            ours(*arguments)


def test_half_precision_is_scanned_in_float32() -> None:
    reference, ours = pair("GRU", 4, 5, dtype=torch.bfloat16)
    x = torch.randn(40, 2, 4, dtype=torch.bfloat16)
    expected, found = everything(reference, x), everything(ours, x)
    assert found["grad weight_hh_l0"].dtype == torch.bfloat16
    assert largest_error({k: v.float() for k, v in expected.items()}, found) < 0.05


def test_every_combination_of_options_on_one_layer_is_covered_by_torch_constructor_names() -> None:
    for layers, first, both in itertools.product((1, 2), (True, False), (True, False)):
        ours = scan.LSTM(3, 4, layers, True, first, 0.0, both, 2)
        theirs = nn.LSTM(3, 4, layers, True, first, 0.0, both, 2)
        assert {k: v.shape for k, v in ours.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
