"""The memory of the backward pass: predicted before, counted while it runs, bounded by the limit given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from outcore.errors import ScanError
from outcore.scan import Options
from outcore.scan.options import as_bytes
from tests.scan.live import LiveBytes
from tests.scan.oracle import everything, largest_error, pair

CASES: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("GRU", {}),
    ("LSTM", {}),
    ("LSTM", {"proj_size": 6}),
    ("GRU", {"bidirectional": True}),
]


def counted(module: Any, inputs: int) -> tuple[int, int]:
    """Predicted and counted peak bytes of a backward pass."""
    x = torch.randn(400, 8, inputs, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        output, _ = module(x)
    ones = torch.ones_like(output)
    with LiveBytes() as live:
        torch.autograd.grad(output, [x, *module.parameters()], ones)
    return module.report.layers[0].predicted_bytes, live.peak


@pytest.mark.parametrize(("kind", "extra"), CASES)
@pytest.mark.parametrize("inputs", [3, 40])
@pytest.mark.parametrize("chunk", [None, 4])
def test_peak_is_as_predicted(kind: str, extra: dict[str, Any], inputs: int, chunk: int | None) -> None:
    _, ours = pair(kind, inputs, 12, Options(backward="scan", solver="products", chunk=chunk), **extra)
    predicted, peak = counted(ours, inputs)
    print(f"predicted {predicted:,}, counted {peak:,}, {predicted / peak - 1:+.1%}")
    assert peak <= predicted <= 1.35 * peak


@pytest.mark.parametrize(("kind", "extra"), CASES)
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_limit_is_kept_by_handling_segments(kind: str, extra: dict[str, Any], share: float) -> None:
    _, free = pair(kind, 3, 12, Options(backward="scan", solver="products"), **extra)
    limit = int(share * counted(free, 3)[0])
    _, ours = pair(kind, 3, 12, Options(backward="scan", solver="products", memory=limit), **extra)
    predicted, peak = counted(ours, 3)
    assert peak <= predicted <= limit


@pytest.mark.parametrize(("kind", "extra"), CASES)
def test_gradients_do_not_depend_on_the_limit(kind: str, extra: dict[str, Any]) -> None:
    _, free = pair(kind, 3, 12, Options(backward="scan"), **extra)
    limit = counted(free, 3)[0] // 2
    reference, ours = pair(kind, 3, 12, Options(backward="scan", memory=limit, chunk=20), **extra)
    x = torch.randn(400, 8, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        expected, found = everything(reference, x), everything(ours, x)
    assert len(ours.report.layers[0].solvers) > 1
    assert largest_error(expected, found) < 1e-9


def test_a_limit_that_cannot_be_kept_names_the_smallest_that_can() -> None:
    _, ours = pair("GRU", 3, 12, Options(backward="scan", memory=50_000))
    x = torch.randn(400, 8, 3, dtype=torch.float64)
    with pytest.raises(ScanError, match=r"needs at least .* allow Options\(memory=") as refused:
        ours(x)
    smallest = int(str(refused.value).split("memory=")[1].split(")")[0])
    ours.options = Options(backward="scan", memory=smallest)
    ours(x)[0].sum().backward()
    ours.options = Options(backward="scan", memory=smallest - 1)
    with pytest.raises(ScanError):
        ours(x)


def test_sizes_are_read_and_refused() -> None:
    assert as_bytes("1.5GiB") == 1610612736
    assert as_bytes("2 kB") == 2000
    for wrong in ("lots", "-1", 0, "3 parsecs"):
        with pytest.raises(ScanError):
            as_bytes(wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"backward": "cudnn"}, {"solver": "magic"}, {"precision": "fp8"}, {"chunk": 0}, {"memory": "none"}],
)
def test_options_are_checked_when_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScanError):
        Options(**wrong)
