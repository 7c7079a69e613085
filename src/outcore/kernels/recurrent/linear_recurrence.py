"""Triton kernels of the diagonal linear recurrence: tiles of time, scanned inside and passed on one by one.

This module imports Triton and is imported only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _then(a1, b1, a2, b2):
    return a2 * a1, a2 * b1 + b2


@triton.jit
def _then_complex(ar1, ai1, br1, bi1, ar2, ai2, br2, bi2):
    return (
        ar2 * ar1 - ai2 * ai1,
        ar2 * ai1 + ai2 * ar1,
        ar2 * br1 - ai2 * bi1 + br2,
        ar2 * bi1 + ai2 * br1 + bi2,
    )


@triton.jit
def _row(x, rows, wanted):
    """One row of a tile."""
    return tl.sum(tl.where(rows == wanted, x, 0.0), axis=0)


@triton.jit
def recur(
    a, b, starts, states, factors, T, L, C,
    REVERSE: tl.constexpr, ENDS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """States of h = a h + b over one chunk of L steps, BC channels; `a`, `b`, `states` are [T, C].

    From `starts` [K, C]; ENDS: from zero, and only the chunk's last state [K, C] and product `factors` are
    written.
    """
    k = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    rows = tl.arange(0, BT)[:, None]
    inside = cols < C
    if ENDS:
        carry = tl.zeros([BC], dtype=a.dtype.element_ty)
    else:
        carry = tl.load(starts + k * C + cols, mask=inside, other=0.0)
    product = tl.full([BC], 1.0, dtype=a.dtype.element_ty)
    first = k * L
    last = tl.minimum(T, first + L)
    for block in range(first, last, BT):
        t = block + rows
        mask = (t < last) & inside[None, :]
        at = t
        if REVERSE:
            at = T - 1 - t
        place = at * C + cols[None, :]
        factor = tl.load(a + place, mask=mask, other=1.0)
        added = tl.load(b + place, mask=mask, other=0.0)
        factor, added = tl.associative_scan((factor, added), 0, _then)
        if ENDS:
            end = _row(factor, rows, BT - 1)
            carry = end * carry + _row(added, rows, BT - 1)
            product = end * product
        else:
            found = factor * carry[None, :] + added
            tl.store(states + place, found, mask=mask)
            carry = _row(found, rows, BT - 1)
    if ENDS:
        tl.store(states + k * C + cols, carry, mask=inside)
        tl.store(factors + k * C + cols, product, mask=inside)


@triton.jit
def recur_complex(
    a, b, starts, states, factors, T, L, C,
    REVERSE: tl.constexpr, ENDS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """As `recur`, for complex numbers stored as pairs."""
    k = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    rows = tl.arange(0, BT)[:, None]
    inside = cols < C
    if ENDS:
        cr = tl.zeros([BC], dtype=a.dtype.element_ty)
        ci = tl.zeros([BC], dtype=a.dtype.element_ty)
    else:
        cr = tl.load(starts + 2 * (k * C + cols), mask=inside, other=0.0)
        ci = tl.load(starts + 2 * (k * C + cols) + 1, mask=inside, other=0.0)
    pr = tl.full([BC], 1.0, dtype=a.dtype.element_ty)
    pi = tl.zeros([BC], dtype=a.dtype.element_ty)
    first = k * L
    last = tl.minimum(T, first + L)
    for block in range(first, last, BT):
        t = block + rows
        mask = (t < last) & inside[None, :]
        at = t
        if REVERSE:
            at = T - 1 - t
        place = 2 * (at * C + cols[None, :])
        ar = tl.load(a + place, mask=mask, other=1.0)
        ai = tl.load(a + place + 1, mask=mask, other=0.0)
        br = tl.load(b + place, mask=mask, other=0.0)
        bi = tl.load(b + place + 1, mask=mask, other=0.0)
        ar, ai, br, bi = tl.associative_scan((ar, ai, br, bi), 0, _then_complex)
        if ENDS:
            er, ei = _row(ar, rows, BT - 1), _row(ai, rows, BT - 1)
            cr, ci = er * cr - ei * ci + _row(br, rows, BT - 1), er * ci + ei * cr + _row(bi, rows, BT - 1)
            pr, pi = er * pr - ei * pi, er * pi + ei * pr
        else:
            hr = ar * cr[None, :] - ai * ci[None, :] + br
            hi = ar * ci[None, :] + ai * cr[None, :] + bi
            tl.store(states + place, hr, mask=mask)
            tl.store(states + place + 1, hi, mask=mask)
            cr, ci = _row(hr, rows, BT - 1), _row(hi, rows, BT - 1)
    if ENDS:
        tl.store(states + 2 * (k * C + cols), cr, mask=inside)
        tl.store(states + 2 * (k * C + cols) + 1, ci, mask=inside)
        tl.store(factors + 2 * (k * C + cols), pr, mask=inside)
        tl.store(factors + 2 * (k * C + cols) + 1, pi, mask=inside)
