"""Chains of Jacobians: any length, any number of levels, dense, sparse, complex; and the affine scan below."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from outcore.errors import ScanError
from outcore.scan import chain
from outcore.scan.affine import affine_scan, states


def one_by_one(jacobians: list[Tensor], gradient: Tensor) -> list[Tensor]:
    found = []
    for jacobian in reversed(jacobians):
        gradient = (jacobian.mH @ gradient.unsqueeze(-1)).squeeze(-1)
        found.append(gradient)
    return found[::-1]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 100])
@pytest.mark.parametrize("levels", [None, 0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_equals_multiplying_one_by_one(n: int, levels: int | None, dtype: torch.dtype) -> None:
    jacobians = torch.randn(n, 2, 3, 3, dtype=dtype) / 2
    gradient = torch.randn(2, 3, dtype=dtype)
    found = chain(jacobians, gradient, levels=levels)
    assert isinstance(found, Tensor)
    assert found.shape == (n, 2, 3)
    for a, b in zip(found, one_by_one(list(jacobians), gradient), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("levels", [None, 0, 1])
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_jacobians_of_different_sizes(n: int, levels: int | None, layout: torch.layout) -> None:
    sizes = [3, 5, 2, 7, 1, 4, 6, 3][: n + 1]
    dense = [torch.randn(b, a, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
    dense = [matrix * (torch.rand_like(matrix) < 0.5) for matrix in dense]
    gradient = torch.randn(sizes[-1], dtype=torch.float64)
    if layout == torch.sparse_csr:
        given = [matrix.to_sparse_csr() for matrix in dense]
    elif layout == torch.sparse_coo:
        given = [matrix.to_sparse() for matrix in dense]
    else:
        given = dense
    found = chain(given, gradient, levels=levels)
    for a, b in zip(found, one_by_one(dense, gradient), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_first_and_second_derivatives_of_a_chain(levels: int | None, dtype: torch.dtype) -> None:
    jacobians = torch.randn(6, 2, 2, dtype=dtype, requires_grad=True)
    gradient = torch.randn(2, dtype=dtype, requires_grad=True)

    def run(jacobians: Tensor, gradient: Tensor) -> Tensor:
        found = chain(jacobians, gradient, levels=levels)
        assert isinstance(found, Tensor)
        return found

    assert torch.autograd.gradcheck(run, (jacobians, gradient))
    assert torch.autograd.gradgradcheck(run, (jacobians, gradient))


def test_derivatives_through_a_list_of_dense_jacobians() -> None:
    matrices = [torch.randn(b, a, dtype=torch.float64, requires_grad=True) for a, b in ((2, 3), (3, 1), (1, 4))]
    gradient = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, *m: tuple(chain(m, g)), (gradient, *matrices))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_affine_scan_with_offsets_and_its_derivatives(n: int) -> None:
    matrices = torch.randn(n, 2, 2, dtype=torch.float64, requires_grad=True)
    offsets = torch.randn(n, 2, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, dtype=torch.float64, requires_grad=True)
    state, expected = start, []
    for i in range(n):
        state = matrices[i] @ state + offsets[i]
        expected.append(state)
    torch.testing.assert_close(affine_scan(matrices, offsets, start), torch.stack(expected))
    torch.testing.assert_close(states(matrices, offsets, start)[1:], torch.stack(expected))
    assert torch.autograd.gradcheck(affine_scan, (matrices, offsets, start))
    assert torch.autograd.gradgradcheck(affine_scan, (matrices, offsets, start))


def test_a_jacobian_that_is_not_finite_is_named() -> None:
    jacobians = torch.ones(9, 2, 2)
    jacobians[4, 0, 1] = float("inf")
    with pytest.raises(ScanError, match="jacobian 4 is not finite"):
        chain(jacobians, torch.ones(2))
    assert torch.isinf(chain(jacobians, torch.ones(2), check=False)).any()


def test_products_beyond_the_limit_are_refused_before_the_work() -> None:
    jacobians, gradient = torch.ones(100, 8, 8), torch.ones(8)
    with pytest.raises(ScanError, match="levels=0"):
        chain(jacobians, gradient, memory="10KB")
    assert len(chain(jacobians / 8, gradient, memory="10KB", levels=0)) == 100


@pytest.mark.parametrize(
    ("jacobians", "gradient", "message"),
    [
        (torch.ones(4, 2, 3), torch.ones(2), "Pass a list"),
        (torch.ones(4, 2, 2), torch.ones(3), r"must be \(2,\)"),
        (torch.ones(4, 2, 2), torch.ones(2, dtype=torch.float64), "both must agree"),
        ([torch.ones(2, 3), torch.ones(2, 3)], torch.ones(2), "jacobian 0 has shape"),
        ([torch.ones(2, 2).double(), torch.ones(2, 2)], torch.ones(2), "jacobian 0 is torch.float64"),
        ([torch.ones(2, 2).to_sparse()], torch.ones(5, 2), "jacobian 0 is sparse; then the gradient must be"),
        (torch.ones(4, 2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), "floating point"),
    ],
)
def test_sizes_that_do_not_fit(jacobians: Tensor | list[Tensor], gradient: Tensor, message: str) -> None:
    with pytest.raises(ScanError, match=message):
        chain(jacobians, gradient)


def test_levels_must_not_be_negative() -> None:
    with pytest.raises(ScanError, match="levels"):
        chain(torch.ones(4, 2, 2), torch.ones(2), levels=-1)
