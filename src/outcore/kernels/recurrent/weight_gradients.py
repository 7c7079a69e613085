"""Triton kernels of the weights' gradients: all of them in one pass over all steps and sequences.

The gradients of input weights, recurrent weights and biases are one matrix product, (gradients of the gates)ᵀ
(states before, inputs, one), over millions of rows and few columns. The gradients of the gates are formed in
registers from the gradients of the states and the coefficients, the states before each step are the outputs
shifted by one step: neither is written to memory. Each program sums a share of the rows, `add_up` the shares.

Rows of the product: gates in torch's order; of a GRU first the new gate as the input weights see it, then
reset, update, and new as the recurrent weights see it. Columns: states, inputs, one.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from outcore.kernels.recurrent.tile_product import _columns, _inputs, _split, _turned_product


@triton.jit
def _block(
    totals, values, x, states, block, end, r, j, q,
    H: tl.constexpr, IN: tl.constexpr, S: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Gradients of states, their coefficients, states and inputs of a block of rows."""
    at = tl.cast(block, tl.int64)
    some = r < end - block
    left = some & (j < LEFT)
    if KIND == 0:
        g = tl.load(totals + at * S + (r * S + j), mask=left, other=0.0)
        v = g
    if KIND == 1:
        g = tl.load(totals + at * S + (r * S + j % H), mask=left, other=0.0)
        v = tl.load(values + at * (M * H) + (r * (M * H) + j), mask=left, other=0.0)
    if KIND == 2:
        place = tl.where(j < 3 * H, H, 0) + j % H
        g = tl.load(totals + at * S + (r * S + place), mask=left, other=0.0)
        v = tl.load(values + at * (M * H) + (r * (M * H) + 2 * H + j), mask=left, other=0.0)
    h = tl.load(states + at * H + (r * H + q), mask=some & (q < H), other=0.0)
    return g, v, h, _inputs(x + at * IN + r * IN, some, q, H, IN)


@triton.jit
def _rows(
    total, totals, values, x, states, first, end, j, q,
    H: tl.constexpr, IN: tl.constexpr, S: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`total` and the products of rows `first` to `end`; row r of `states` is what came before step r."""
    r = tl.arange(0, BLOCK)[:, None]
    now = _block(totals, values, x, states, first, end, r, j, q, H, IN, S, M, KIND, LEFT)
    for block in range(first, end, BLOCK):
        soon = _block(totals, values, x, states, block + BLOCK, end, r, j, q, H, IN, S, M, KIND, LEFT)
        g, v, h, u = now
        if KIND >= 1:
            g = g * v
        h = _columns(h, u, q, H, IN)  # where there is no row, g is zero
        total += _turned_product(_split(g, PRECISION), _split(h, PRECISION), PRECISION)
        now = soon
    return total


@triton.jit(do_not_specialize=["R", "N", "SHARE", "shares"])
def sum_up(
    totals, values, x, y, before, out,
    R, N, SHARE, shares,
    H: tl.constexpr, IN: tl.constexpr, S: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr,
    PRECISION: tl.constexpr, COLS: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out` [D, shares, LEFT, RIGHT] from `totals` [D, R, S], `values` [D, R, M, H], `x` [D, R, I], `y` [D, R,
    H] and the states `before` [D, N, H]; R is steps times N."""
    share = tl.program_id(0)
    d = tl.program_id(2).to(tl.int64)
    j = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    q = tl.arange(0, RIGHT)[None, :]
    totals += d * R * S
    values += d * R * (M * H)
    x += d * R * IN
    total = tl.zeros([COLS, RIGHT], dtype=y.dtype.element_ty)
    first = N + share * SHARE
    if share == 0:
        states = before + d * N * H
        total = _rows(total, totals, values, x, states, N * 0, N, j, q, H, IN, S, M, KIND, LEFT, PRECISION, BLOCK)
    states = y + (d * R - N) * H
    end = tl.minimum(R, first + SHARE)
    total = _rows(total, totals, values, x, states, first, end, j, q, H, IN, S, M, KIND, LEFT, PRECISION, BLOCK)
    to = ((d * shares + share) * LEFT + tl.trans(j)) * RIGHT + q
    tl.store(out + to, total, mask=tl.trans(j) < LEFT)


@triton.jit(do_not_specialize=["shares"])
def add_up(
    parts, of_input, of_hidden, of_input_bias, of_hidden_bias, shares,
    H: tl.constexpr, IN: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr, G: tl.constexpr, BIAS: tl.constexpr,
    RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the product from its shares, to where it belongs: `of_input` [D, G·H, I], `of_hidden` [D, G·H,
    H] and the biases' [D, G·H]."""
    j = tl.program_id(0)
    d = tl.program_id(1)
    q = tl.arange(0, RIGHT)[None, :]
    total = tl.zeros([BLOCK, RIGHT], dtype=parts.dtype.element_ty)
    for first in range(0, shares, BLOCK):
        s = (first + tl.arange(0, BLOCK))[:, None]
        total += tl.load(parts + ((d * shares + s) * LEFT + j) * RIGHT + q, mask=s < shares, other=0.0)
    q = tl.arange(0, RIGHT)
    found = tl.sum(total, axis=0)
    gate = j
    to_input = j >= 0
    to_hidden = j >= 0
    if KIND == 1:
        gate = tl.where(j < H, j + 2 * H, j - H)
        to_input = j < 3 * H
        to_hidden = j >= H
    row = d * (G * H) + gate
    tl.store(of_hidden + row * H + q, found, mask=to_hidden & (q < H))
    tl.store(of_input + row * IN + q - H, found, mask=to_input & (q >= H) & (q < H + IN))
    if BIAS:
        tl.store(of_input_bias + row + q * 0, found, mask=to_input & (q == H + IN))
        tl.store(of_hidden_bias + row + q * 0, found, mask=to_hidden & (q == H + IN))
