"""States of ``s_i = A_i s_{i-1} + b_i`` for all i, in logarithmic depth.

The scan of BPPSA (Wang, Bai and Pekhimenko, MLSys 2020): combining two neighbours is a matrix product, which
is associative but does not commute, so the order of operands is kept everywhere. It is Blelloch's scan in two
phases, written as one recursion that takes any length:

    up      neighbours are combined into half as many elements      matrix times matrix
    middle  the states between the combined elements (recursion, or one by one after `levels` halvings)
    down    the states inside each pair, from the state before it   matrix times vector only

    elements     A0  A1  A2  A3  A4  A5
    combined      A1·A0   A3·A2                  the last pair is never needed as a product
    states     v0      v2      v4                from the recursion
               v0  v1  v2  v3  v4  v5  v6        down: v1 = A0 v0, v3 = A2 v2, v5 = A4 v4, v6 = A5 v5

The gradient of such a scan is the same scan run backwards over the conjugate transposes, so the backward pass
is written with `affine_scan` itself and can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def states(matrices: Tensor, offsets: Tensor | None, start: Tensor, levels: int | None = None) -> Tensor:
    """The n + 1 states before, between and after n elements.

    Args:
        matrices: ``[n, ..., d, d]``.
        offsets: ``[n, ..., d]``, or None for zeros.
        start: ``[..., d]``.
        levels: halvings before the rest is run one by one; None: down to a single element.
    """
    n = len(matrices)
    if n == 0:
        return start.unsqueeze(0)
    if levels is not None and levels <= 0:
        found = [start]
        for i in range(n):
            found.append(_apply(matrices[i], None if offsets is None else offsets[i], found[-1]))
        return torch.stack(found)
    pairs = (n - 1) // 2
    left, right = matrices[0 : 2 * pairs : 2], matrices[1 : 2 * pairs : 2]
    added = None
    if offsets is not None:
        added = _apply(right, offsets[1 : 2 * pairs : 2], offsets[0 : 2 * pairs : 2])
    even = states(right @ left, added, start, None if levels is None else levels - 1)
    odd = _apply(matrices[0 : 2 * pairs + 1 : 2], None if offsets is None else offsets[0 : 2 * pairs + 1 : 2], even)
    both = torch.stack((even, odd), dim=1).flatten(0, 1)
    if n % 2:
        return both
    last = _apply(matrices[-1], None if offsets is None else offsets[-1], both[-1])
    return torch.cat((both, last.unsqueeze(0)))


def affine_scan(matrices: Tensor, offsets: Tensor | None, start: Tensor, levels: int | None = None) -> Tensor:
    """The n states after each element; differentiable any number of times. Arguments as in `states`."""
    if len(matrices) == 0:
        return start.new_empty((0, *start.shape))
    result: Tensor = _AffineScan.apply(matrices, offsets, start, levels)  # type: ignore[no-untyped-call]
    return result


def _apply(matrix: Tensor, offset: Tensor | None, vector: Tensor) -> Tensor:
    product = (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    return product if offset is None else product + offset


class _AffineScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrices: Tensor, offsets: Tensor | None, start: Tensor, levels: int | None) -> Tensor:
        found = states(matrices, offsets, start, levels)[1:].contiguous()
        ctx.save_for_backward(matrices, start, found)
        ctx.levels, ctx.has_offsets = levels, offsets is not None
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        matrices, start, found = ctx.saved_tensors
        grad = grads[0]
        flipped = matrices.mH.flip(0)
        tail = affine_scan(flipped[:-1], grad.flip(0)[1:], grad[-1], ctx.levels).flip(0)
        adjoint = torch.cat((tail, grad[-1:]))
        before = torch.cat((start.unsqueeze(0), found[:-1]))
        of_matrices = adjoint.unsqueeze(-1) * before.conj().unsqueeze(-2) if ctx.needs_input_grad[0] else None
        of_start = _apply(flipped[-1], None, adjoint[0]) if ctx.needs_input_grad[2] else None
        return of_matrices, adjoint if ctx.has_offsets else None, of_start, None
