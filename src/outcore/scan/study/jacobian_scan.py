"""Gradients along a chain of Jacobians by a scan: back-propagation as BPPSA writes it.

With ``x_i = f_i(x_{i-1})`` and ``J_i = dx_i/dx_{i-1}``, back-propagation is ``g_{i-1} = J_iᵀ g_i``.
Multiplying matrices is associative, so all g_i come out of a scan of ``[g_n, J_nᵀ, …, J_1ᵀ]`` in 2 log2 n
steps instead of n. The first element is a vector, which keeps the down-sweep to products of matrix and vector
(`outcore.scan.affine`).

Jacobians of one size come as one tensor, and each level is one batched product. Jacobians of different sizes
come as a list, dense or sparse; each level is then a list of products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outcore.errors import ScanError
from outcore.machine.free_memory import free_bytes
from outcore.scan.affine import affine_scan
from outcore.scan.options import as_bytes


def chain(
    jacobians: Tensor | Sequence[Tensor],
    gradient: Tensor,
    *,
    levels: int | None = None,
    memory: int | str | None = None,
    check: bool = True,
) -> Tensor | list[Tensor]:
    """Gradients of x_0 … x_{n-1}, given that of x_n.

    >>> jacobians = torch.randn(100, 3, 3, dtype=torch.float64) / 3
    >>> gradients = chain(jacobians, torch.ones(3, dtype=torch.float64))
    >>> torch.allclose(gradients[98], jacobians[98].T @ gradients[99])
    True

    Args:
        jacobians: ``[n, ..., d, d]``, differentiable any number of times; or a list of n matrices
            ``[..., d_i, d_{i-1}]``, dense (differentiable too) or sparse (two-dimensional).
        gradient: ``[..., d]``; for sparse matrices a vector.
        levels: halvings of the chain before the rest runs one by one, the paper's hybrid; none: all.
        memory: bound on the products of Jacobians, as bytes or ``"2GiB"``; none: the free memory.
        check: refuse Jacobians that are not finite. It waits for the device.

    Returns:
        The gradients in the order of the chain, as one tensor or as a list, like `jacobians`.

    Raises:
        ScanError: sizes do not fit, a Jacobian is not finite, or the products need more memory than allowed.
    """
    if levels is not None and levels < 0:
        raise ScanError(f"levels must be at least 0, not {levels}")
    limit = free_bytes(gradient.device) if memory is None else as_bytes(memory)
    if isinstance(jacobians, Tensor):
        _check_uniform(jacobians, gradient)
        _check_products(jacobians.numel() * jacobians.element_size(), limit, levels)
        if check:
            _check_finite(list(jacobians), "jacobian")
        if len(jacobians) == 0:
            return gradient.new_empty((0, *gradient.shape))
        return affine_scan(jacobians.mH.flip(0), None, gradient, levels).flip(0)
    matrices = list(jacobians)
    _check_list(matrices, gradient)
    _check_products(_most_bytes(matrices), limit, levels)
    if check:
        _check_finite([m.values() if m.layout == torch.sparse_csr else m for m in _rows(matrices)], "jacobian")
    turned = [_turned(m) for m in reversed(matrices)]
    return _states(turned, gradient, levels)[:0:-1]


def _states(matrices: list[Tensor], start: Tensor, levels: int | None) -> list[Tensor]:
    """As `outcore.scan.affine.states`, for matrices of different sizes."""
    n = len(matrices)
    if n == 0:
        return [start]
    if levels == 0:
        found = [start]
        for matrix in matrices:
            found.append(_apply(matrix, found[-1]))
        return found
    pairs = (n - 1) // 2
    combined = [matrices[2 * i + 1] @ matrices[2 * i] for i in range(pairs)]
    even = _states(combined, start, None if levels is None else levels - 1)
    found = []
    for i, state in enumerate(even):
        found += [state, _apply(matrices[2 * i], state)]
    if n % 2 == 0:
        found.append(_apply(matrices[-1], found[-1]))
    return found


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _rows(matrices: list[Tensor]) -> list[Tensor]:
    return [m if m.layout in (torch.strided, torch.sparse_csr) else m.to_sparse_csr() for m in matrices]


def _turned(matrix: Tensor) -> Tensor:
    """The conjugate transpose, ready to be multiplied from the left."""
    if matrix.layout == torch.strided:
        return matrix.mH
    return matrix.conj().t().to_sparse_csr() if matrix.is_complex() else matrix.t().to_sparse_csr()


def _check_uniform(jacobians: Tensor, gradient: Tensor) -> None:
    if jacobians.dim() < 3 or jacobians.shape[-1] != jacobians.shape[-2]:
        raise ScanError(
            f"jacobians has shape {tuple(jacobians.shape)}; as one tensor it must be [n, ..., d, d]. "
            "Pass a list for Jacobians that are not square"
        )
    if gradient.shape != jacobians.shape[1:-1]:
        raise ScanError(
            f"gradient has shape {tuple(gradient.shape)}; for jacobians of shape {tuple(jacobians.shape)} "
            f"it must be {tuple(jacobians.shape[1:-1])}"
        )
    _check_kind(jacobians, gradient, "jacobians")


def _check_kind(matrix: Tensor, gradient: Tensor, name: str) -> None:
    if matrix.dtype != gradient.dtype or matrix.device != gradient.device:
        raise ScanError(
            f"{name} is {matrix.dtype} on {matrix.device} and gradient is {gradient.dtype} on "
            f"{gradient.device}; both must agree"
        )
    if not (matrix.is_floating_point() or matrix.is_complex()):
        raise ScanError(f"{name} must be floating point or complex, not {matrix.dtype}")


def _check_list(matrices: list[Tensor], gradient: Tensor) -> None:
    size = gradient.shape[-1] if gradient.dim() else 0
    for i in reversed(range(len(matrices))):
        matrix = matrices[i]
        _check_kind(matrix, gradient, f"jacobian {i}")
        if matrix.dim() < 2 or matrix.shape[-2] != size:
            raise ScanError(
                f"jacobian {i} has shape {tuple(matrix.shape)}; what follows it has size {size}, "
                f"so it must be [..., {size}, inputs]"
            )
        if matrix.layout != torch.strided and gradient.dim() != 1:
            raise ScanError(f"jacobian {i} is sparse; then the gradient must be a vector, not {gradient.dim()}-D")
        size = matrix.shape[-1]


def _check_finite(matrices: list[Tensor], name: str) -> None:
    if not matrices:
        return
    good = torch.stack([torch.isfinite(m.detach()).all() for m in matrices])
    if not bool(good.all()):
        bad = (~good).nonzero().flatten().tolist()
        raise ScanError(f"{name} {bad[0]} is not finite ({len(bad)} of {len(matrices)} are not)")


def _most_bytes(matrices: list[Tensor]) -> int:
    """Bytes of all products if none had a zero; for sparse ones an upper bound by their rows and columns."""
    total, sizes = 0, [(m.shape[-2], m.shape[-1], m[..., 0, 0].numel() if m.layout == torch.strided else 1,
                        m.element_size(), m.layout == torch.strided) for m in matrices]  # fmt: skip
    while len(sizes) > 1:
        pairs = (len(sizes) - 1) // 2
        merged = []
        for i in range(pairs):
            early, late = sizes[len(sizes) - 2 * i - 2], sizes[len(sizes) - 2 * i - 1]
            merged.append((late[0], early[1], max(early[2], late[2]), late[3], early[4] and late[4]))
        total += sum(rows * cols * batch * item for rows, cols, batch, item, dense in merged if dense)
        sizes = merged[::-1]
    return total


def _check_products(needed: int, limit: int, levels: int | None) -> None:
    if levels != 0 and needed > limit:
        raise ScanError(
            f"the products of these Jacobians take about {needed:,} bytes and {limit:,} may be used; "
            "make the batch smaller, or use levels=0, which multiplies no Jacobians"
        )
