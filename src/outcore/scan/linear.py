"""The diagonal linear recurrence ``h_t = a_t h_{t-1} + b_t``, in logarithmic depth.

The building block of linear RNNs and state-space models (S5, LRU, Mamba), real or complex, and of this
package: the memories of an LSTM are such a recurrence once its gates are known.

Two neighbouring steps make one step, ``(a1, b1) then (a2, b2) = (a2 a1, a2 b1 + b2)``, so half of the states
come from a recurrence of half the length and the other half from one more step each. The depth is 2 log2 T
and the work twice that of a loop. On a GPU with Triton one kernel does it over tiles of time.

The gradient is the same recurrence run backwards with the conjugate factors, so it can be differentiated
again. (PyTorch's own ``associative_scan`` is not used: in 2.11 to 2.14 its pointwise form builds a T x T
matrix in backward and its gradient for the factors of this very recurrence is zero.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outcore.errors import ScanError


def linear_recurrence(
    a: Tensor,
    b: Tensor,
    start: Tensor | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    check: bool = True,
) -> Tensor:
    """All states of ``h_t = a_t h_{t-1} + b_t``, differentiable any number of times.

    >>> linear_recurrence(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 1.0]))
    tensor([1.0000, 1.5000, 1.7500])

    Args:
        a: factors; broadcast against `b`, so one factor per channel will do.
        b: what each step adds; floating point or complex.
        start: the state before the first step, shaped like `b` without `dim`; none: zero.
        dim: the dimension of time.
        reverse: run from the last step to the first: ``h_t = a_t h_{t+1} + b_t``.
        check: refuse factors that are not finite. It waits for the device; leave it out where that costs too
            much.

    Raises:
        ScanError: shapes or types do not fit, or a factor is not finite.
    """
    a, b, start = _checked(a, b, start, dim)
    if check:
        _check_finite(a, dim)
    a, b = a.movedim(dim, 0), b.movedim(dim, 0)
    if len(b) == 0:
        return b.movedim(0, dim)
    if start is None:
        start = torch.zeros_like(b[0])
    states: Tensor = _LinearRecurrence.apply(a, b, start, reverse)  # type: ignore[no-untyped-call]
    return states.movedim(0, dim)


def _checked(a: Tensor, b: Tensor, start: Tensor | None, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    if b.dim() == 0:
        raise ScanError("b is a single number; it needs a dimension of time")
    if not -b.dim() <= dim < b.dim():
        raise ScanError(f"dim {dim} is not a dimension of b, which has shape {tuple(b.shape)}")
    kind = torch.promote_types(a.dtype, b.dtype)
    if start is not None:
        kind = torch.promote_types(kind, start.dtype)
    if not (kind.is_floating_point or kind.is_complex):
        raise ScanError(f"a and b must be floating point or complex, not {a.dtype} and {b.dtype}; try b.float()")
    try:
        a = a.to(kind).expand(b.shape)
    except RuntimeError:
        raise ScanError(f"a of shape {tuple(a.shape)} does not broadcast to the shape of b, {tuple(b.shape)}") from None
    if a.device != b.device or (start is not None and start.device != b.device):
        raise ScanError(f"a, b and start must be on one device; a is on {a.device}, b on {b.device}")
    if start is not None:
        wanted = list(b.shape)
        del wanted[dim]
        if list(start.shape) != wanted:
            raise ScanError(f"start has shape {tuple(start.shape)}; b without dim {dim} has {tuple(wanted)}")
        start = start.to(kind)
    return a, b.to(kind), start


def _check_finite(a: Tensor, dim: int) -> None:
    finite = torch.isfinite(a.detach())
    if bool(finite.all()):
        return
    others = [d for d in range(a.dim()) if d != dim % a.dim()]
    good = finite.all(dim=others) if others else finite
    step = int((~good).nonzero()[0])
    raise ScanError(f"the factor of step {step} is not finite (of {a.shape[dim]} steps, {int((~good).sum())} are not)")


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
        found = _states(a, b, start, reverse)
        ctx.save_for_backward(a, start, found)
        ctx.reverse = reverse
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        a, start, found = ctx.saved_tensors
        grad, reverse = grads[0], ctx.reverse
        a = a.conj()
        # The factor that leads out of a step is the next step's; none leads out of the last.
        one = torch.zeros_like(a[:1])
        if reverse:
            onward = torch.cat((one, a[:-1]))
            before = torch.cat((found[1:], start.unsqueeze(0)))
        else:
            onward = torch.cat((a[1:], one))
            before = torch.cat((start.unsqueeze(0), found[:-1]))
        adjoint = linear_recurrence(onward, grad, reverse=not reverse, check=False)
        of_a = adjoint * before.conj() if ctx.needs_input_grad[0] else None
        first = -1 if reverse else 0
        of_start = a[first] * adjoint[first] if ctx.needs_input_grad[2] else None
        return of_a, adjoint, of_start, None


def _states(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    if b.is_cuda:
        from outcore.scan.kernels import linear_recurrence as linear_kernels

        if (found := linear_kernels.linear_states(a, b, start, reverse)) is not None:
            return found
    if reverse:
        return _tree(a.flip(0), b.flip(0), start).flip(0)
    return _tree(a, b, start)


def _tree(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States after each step; the last of an even number of steps is reached from the one before it."""
    n = len(b)
    found = torch.empty_like(b, memory_format=torch.contiguous_format)
    if n <= 8:
        state = start
        for i in range(n):
            state = torch.addcmul(b[i], a[i], state)
            found[i] = state
        return found
    pairs = n // 2
    left_a, left_b = a[0 : 2 * pairs : 2], b[0 : 2 * pairs : 2]
    right_a, right_b = a[1 : 2 * pairs : 2], b[1 : 2 * pairs : 2]
    odd = _tree(right_a * left_a, torch.addcmul(right_b, right_a, left_b), start)
    found[1 : 2 * pairs : 2] = odd
    found[0] = torch.addcmul(b[0], a[0], start)
    rest = slice(2, None, 2)
    found[rest] = torch.addcmul(b[rest], a[rest], odd[: len(range(2, n, 2))])
    return found
