"""The diagonal linear recurrence against a loop, and its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outcore.errors import ScanError
from outcore.scan import linear_recurrence


def loop(a: Tensor, b: Tensor, start: Tensor, reverse: bool = False) -> Tensor:
    state, found = start, [start] * len(b)
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        state = a[t] * state + b[t]
        found[t] = state
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 16, 17, 100, 1023])
@pytest.mark.parametrize("reverse", [False, True])
def test_equals_a_loop(dtype: torch.dtype, steps: int, reverse: bool) -> None:
    a, b = torch.randn(steps, 2, 3, dtype=dtype), torch.randn(steps, 2, 3, dtype=dtype)
    a = a / a.abs().clamp(min=1)
    start = torch.randn(2, 3, dtype=dtype)
    torch.testing.assert_close(linear_recurrence(a, b, start, reverse=reverse), loop(a, b, start, reverse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, 5, 19])
def test_first_and_second_derivatives(dtype: torch.dtype, reverse: bool, steps: int) -> None:
    a, b = torch.randn(steps, 2, dtype=dtype) / 2, torch.randn(steps, 2, dtype=dtype)
    inputs = tuple(x.requires_grad_() for x in (a, b, torch.randn(2, dtype=dtype)))

    def run(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        return linear_recurrence(a, b, start, reverse=reverse)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_time_may_be_any_dimension_and_factors_broadcast() -> None:
    a = torch.rand(5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 11, 5, dtype=torch.float64)
    found = linear_recurrence(a, b, dim=1)
    expected = loop(a.expand(11, 3, 5), b.transpose(0, 1), torch.zeros(3, 5, dtype=torch.float64))
    torch.testing.assert_close(found, expected.transpose(0, 1))
    assert torch.autograd.gradcheck(lambda a: linear_recurrence(a, b, dim=1), (a,))


def test_real_factors_of_complex_additions_are_promoted() -> None:
    found = linear_recurrence(torch.full((4, 1), 0.5), torch.ones(4, 1, dtype=torch.complex64))
    assert found.dtype == torch.complex64


def test_no_steps_is_no_states() -> None:
    assert linear_recurrence(torch.ones(0, 3), torch.ones(0, 3)).shape == (0, 3)


def test_factors_that_are_not_finite_are_named() -> None:
    a = torch.ones(9, 2)
    a[5, 1] = float("nan")
    with pytest.raises(ScanError, match="factor of step 5 is not finite"):
        linear_recurrence(a, torch.ones(9, 2))


@pytest.mark.parametrize(
    ("a", "b", "start", "dim", "message"),
    [
        (torch.ones(3), torch.tensor(1.0), None, 0, "dimension of time"),
        (torch.ones(3), torch.ones(3), None, 4, "dim 4"),
        (torch.ones(4), torch.ones(3), None, 0, "does not broadcast"),
        (torch.ones(3, 2), torch.ones(3, 2), torch.ones(3), 0, "start has shape"),
        (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), None, 0, "floating point"),
    ],
)
def test_bad_arguments(a: Tensor, b: Tensor, start: Tensor | None, dim: int, message: str) -> None:
    with pytest.raises(ScanError, match=message):
        linear_recurrence(a, b, start, dim=dim)
