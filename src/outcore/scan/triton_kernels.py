"""The Triton kernels: one program follows one sequence (or a tile of rows) through one chunk, state in
registers.

A chunk's steps depend on each other, so what counts is the time of one step: no launch, no trip to memory for
the state, the recurrent weights held in registers, and what the next steps need loaded two steps ahead. All
programs together cover every sequence and every chunk.

    follow_back     gradients back through a chunk, one vector per program (a sweep, or one row of a product)
    multiply_back   the same for a tile of rows on tensor cores: the product of a chunk's Jacobians
    pass_back       the carries from chunk to chunk through their products
    follow_on       the cell itself forward through a chunk
    gru_values, …   the coefficients of a cell in one pass
    recur           the diagonal linear recurrence over tiles of time

KIND is 0 for an RNN, 1 for a GRU, 2 for an LSTM. Index letters as in `outcore.scan.cells`; HP is H padded to
a power of two. This module imports Triton and is imported only where it is about to be used
(`outcore.scan.kernels`).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["follow_back", "follow_on", "multiply_back", "pass_back", "recur", "recur_complex"]


@triton.jit
def _weight(weights, d, gate, rows, cols, H, G: tl.constexpr):
    """The recurrent weights of one gate, [unit of the gate, hidden unit]."""
    place = (d * G + gate) * H * H + rows[:, None] * H + cols[None, :]
    return tl.load(weights + place, mask=(rows[:, None] < H) & (cols[None, :] < H), other=0.0)


@triton.jit
def _turned(weights, d, gate, rows, cols, H, G: tl.constexpr):
    """The same transposed: sums over the first dimension of a tile need the fewest exchanges between threads."""
    place = (d * G + gate) * H * H + cols[None, :] * H + rows[:, None]
    return tl.load(weights + place, mask=(rows[:, None] < H) & (cols[None, :] < H), other=0.0)


@triton.jit
def _step_values(values, grads, at, wanted, i, H, M: tl.constexpr, KIND: tl.constexpr, RELU: tl.constexpr):
    """The output gradient and up to six coefficients of one step; what a kind has not is a copy of the
    first."""
    mask = wanted & (i < H)
    g = tl.load(grads + at * H + i, mask=mask, other=0.0)
    v0 = tl.load(values + at * (M * H) + i, mask=mask, other=0.0)
    if KIND == 0:
        if RELU:
            v0 = tl.where(v0 > 0, 1.0, 0.0).to(g.dtype)
        else:
            v0 = 1 - v0 * v0
    v1, v2, v3, v4, v5 = v0, v0, v0, v0, v0
    if KIND >= 1:
        v1 = tl.load(values + at * (M * H) + H + i, mask=mask, other=0.0)
        v2 = tl.load(values + at * (M * H) + 2 * H + i, mask=mask, other=0.0)
        v3 = tl.load(values + at * (M * H) + 3 * H + i, mask=mask, other=0.0)
        v4 = tl.load(values + at * (M * H) + 4 * H + i, mask=mask, other=0.0)
    if KIND == 2:
        v5 = tl.load(values + at * (M * H) + 5 * H + i, mask=mask, other=0.0)
    return g, v0, v1, v2, v3, v4, v5


@triton.jit
def follow_back(
    values, weights, grads, carries, last_carry, lengths, totals, out, moved,
    T, N, L, K, H, places,
    KIND: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, G: tl.constexpr, S_PER_H: tl.constexpr,
    PACKED: tl.constexpr, PRODUCTS: tl.constexpr, CARRY: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Gradients back through a chunk.

    A sweep writes `totals` [D, T, N, S] and what leaves each chunk, `out` [D, K, N, S]. It starts from
    `last_carry` [D, N, S] in the last chunk, and in the others from `carries` [D, K, N, S]: as given (CARRY 2), as
    what left the next chunk in the previous sweep (1), or from zero (0). In the last two cases `moved` says how
    much what leaves each chunk differs from what the chunk before it started from, and how large it is.

    PRODUCTS: one program per row r of [D, K, N, S + 1, S] starts from the r-th unit vector (the last from zero, and
    only that one adds the output gradients) and writes `out` alone.
    """
    S = S_PER_H * H
    pid = tl.program_id(0).to(tl.int64)
    row = 0
    place = pid
    if PRODUCTS:
        row = (pid % (S + 1)).to(tl.int32)
        place = pid // (S + 1)
    n = place % N
    k = (place // N) % K
    d = place // (N * K)
    i = tl.arange(0, HP)
    w0 = _weight(weights, d, 0, i, i, H, G)
    w1, w2, w3 = w0, w0, w0
    if KIND >= 1:
        w1 = _weight(weights, d, 1, i, i, H, G)
        w2 = _weight(weights, d, 2, i, i, H, G)
    if KIND == 2:
        w3 = _weight(weights, d, 3, i, i, H, G)
    first = k * L
    last = tl.minimum(T, first + L)
    if PACKED:
        last = tl.minimum(last, tl.load(lengths + n))
    if PRODUCTS:
        c = tl.where(i == row, 1.0, 0.0).to(w0.dtype)
        m = tl.where(i + H == row, 1.0, 0.0).to(w0.dtype)
        c = tl.where(i < H, c, 0.0)
        m = tl.where(i < H, m, 0.0)
        keep = tl.where(row == S, 1.0, 0.0).to(w0.dtype)
    elif CARRY == 2:
        c = tl.load(carries + place * S + i, mask=i < H, other=0.0)
        m = c
        if KIND == 2:
            m = tl.load(carries + place * S + H + i, mask=i < H, other=0.0)
    else:
        is_last = k == K - 1
        c = tl.load(last_carry + (d * N + n) * S + i, mask=(i < H) & is_last, other=0.0)
        m = c
        if KIND == 2:
            m = tl.load(last_carry + (d * N + n) * S + H + i, mask=(i < H) & is_last, other=0.0)
        if CARRY == 1:
            shifted = (i < H) & (k < K - 1)
            c += tl.load(carries + (place + N) * S + i, mask=shifted, other=0.0)
            if KIND == 2:
                m += tl.load(carries + (place + N) * S + H + i, mask=shifted, other=0.0)
    base = (d * T) * N + n
    g_a, a0, a1, a2, a3, a4, a5 = _step_values(values, grads, base + (last - 1) * N, last > first, i, H, M, KIND, RELU)
    g_b, b0, b1, b2, b3, b4, b5 = _step_values(
        values, grads, base + (last - 2) * N, last - 1 > first, i, H, M, KIND, RELU
    )
    for j in range(last - first):
        t = last - 1 - j
        g_c, c0, c1, c2, c3, c4, c5 = _step_values(
            values, grads, base + (t - 2) * N, t - 2 >= first, i, H, M, KIND, RELU
        )
        if PRODUCTS:
            g = c + g_a * keep
        else:
            g = c + g_a
            if KIND != 0:
                tl.store(totals + (base + t * N) * S + i, g, mask=i < H)
        if KIND == 0:
            g = g * a0
            if not PRODUCTS:
                tl.store(totals + (base + t * N) * S + i, g, mask=i < H)
            c = tl.sum(g[:, None] * w0, axis=0)
        if KIND == 1:
            parts = (g * a1)[:, None] * w0 + (g * a2)[:, None] * w1 + (g * a3)[:, None] * w2
            c = tl.sum(parts, axis=0) + g * a4
        if KIND == 2:
            q = m + g * a0
            if not PRODUCTS:
                tl.store(totals + (base + t * N) * S + H + i, q, mask=i < H)
            parts = (q * a2)[:, None] * w0 + (q * a3)[:, None] * w1 + (q * a4)[:, None] * w2
            parts += (g * a5)[:, None] * w3
            c = tl.sum(parts, axis=0)
            m = q * a1
        g_a, a0, a1, a2, a3, a4, a5 = g_b, b0, b1, b2, b3, b4, b5
        g_b, b0, b1, b2, b3, b4, b5 = g_c, c0, c1, c2, c3, c4, c5
    to = pid * S
    tl.store(out + to + i, c, mask=i < H)
    if KIND == 2:
        tl.store(out + to + H + i, m, mask=i < H)
    if not PRODUCTS:
        if CARRY != 2:
            size = tl.max(tl.abs(c), axis=0)
            if CARRY == 1:
                c -= tl.load(carries + to + i, mask=i < H, other=0.0)
            change = tl.max(tl.abs(c), axis=0)
            if KIND == 2:
                size = tl.maximum(size, tl.max(tl.abs(m), axis=0))
                if CARRY == 1:
                    m -= tl.load(carries + to + H + i, mask=i < H, other=0.0)
                change = tl.maximum(change, tl.max(tl.abs(m), axis=0))
            counts = k > 0  # nothing starts from what leaves the first chunk
            tl.store(moved + place, tl.where(counts, change, 0.0))
            tl.store(moved + places + place, tl.where(counts, size, 0.0))


@triton.jit
def _dot(x, w, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(x.to(tl.bfloat16), w.to(tl.bfloat16))
    return tl.dot(x, w, input_precision=PRECISION)


@triton.jit
def multiply_back(
    values, weights, grads, lengths, out,
    T, N, L, K, H,
    KIND: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, G: tl.constexpr, S_PER_H: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The product of a chunk's Jacobians, ROWS rows of it: `out` [D, K, N, S + 1, S] as in `follow_back`."""
    S = S_PER_H * H
    place = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = place % N
    k = (place // N) % K
    d = place // (N * K)
    i = tl.arange(0, HP)
    w0 = _weight(weights, d, 0, i, i, H, G)
    w1, w2, w3 = w0, w0, w0
    if KIND >= 1:
        w1 = _weight(weights, d, 1, i, i, H, G)
        w2 = _weight(weights, d, 2, i, i, H, G)
    if KIND == 2:
        w3 = _weight(weights, d, 3, i, i, H, G)
    first = k * L
    last = tl.minimum(T, first + L)
    if PACKED:
        last = tl.minimum(last, tl.load(lengths + n))
    inside = i[None, :] < H
    c = tl.where((i[None, :] == r[:, None]) & inside, 1.0, 0.0)
    m = tl.where((i[None, :] + H == r[:, None]) & inside, 1.0, 0.0)
    keep = tl.where(r == S, 1.0, 0.0)[:, None]
    base = (d * T) * N + n
    g_a, a0, a1, a2, a3, a4, a5 = _step_values(values, grads, base + (last - 1) * N, last > first, i, H, M, KIND, RELU)
    for j in range(last - first):
        t = last - 1 - j
        g_b, b0, b1, b2, b3, b4, b5 = _step_values(
            values, grads, base + (t - 1) * N, t - 1 >= first, i, H, M, KIND, RELU
        )
        g = c + keep * g_a[None, :]
        if KIND == 0:
            c = _dot(g * a0[None, :], w0, PRECISION)
        if KIND == 1:
            c = g * a4[None, :]
            c += _dot(g * a1[None, :], w0, PRECISION)
            c += _dot(g * a2[None, :], w1, PRECISION)
            c += _dot(g * a3[None, :], w2, PRECISION)
        if KIND == 2:
            q = m + g * a0[None, :]
            c = _dot(q * a2[None, :], w0, PRECISION)
            c += _dot(q * a3[None, :], w1, PRECISION)
            c += _dot(q * a4[None, :], w2, PRECISION)
            c += _dot(g * a5[None, :], w3, PRECISION)
            m = q * a1[None, :]
        g_a, a0, a1, a2, a3, a4, a5 = g_b, b0, b1, b2, b3, b4, b5
    to = (place * (S + 1) + r[:, None]) * S + i[None, :]
    mask = (r[:, None] <= S) & inside
    tl.store(out + to, c, mask=mask)
    if KIND == 2:
        tl.store(out + to + H, m, mask=mask)


@triton.jit
def pass_back(rows, start, out, N, K, S, SP: tl.constexpr):
    """Carries into every chunk [D, K, N, S], from the last (`start`, [D, N, S]) to the first."""
    pid = tl.program_id(0).to(tl.int64)
    n = pid % N
    d = pid // N
    i = tl.arange(0, SP)
    square = i[:, None] * S + i[None, :]
    inside = (i[:, None] < S) & (i[None, :] < S)
    c = tl.load(start + pid * S + i, mask=i < S, other=0.0)
    base = d * K * N + n
    at = (base + (K - 1) * N) * (S + 1) * S
    product = tl.load(rows + at + square, mask=inside, other=0.0)
    added = tl.load(rows + at + S * S + i, mask=i < S, other=0.0)
    tl.store(out + (base + (K - 1) * N) * S + i, c, mask=i < S)
    for j in range(K - 1):
        k = K - 1 - j
        at = (base + (k - 1) * N) * (S + 1) * S
        next_product = tl.load(rows + at + square, mask=inside, other=0.0)
        next_added = tl.load(rows + at + S * S + i, mask=i < S, other=0.0)
        c = tl.sum(c[:, None] * product, axis=0) + added
        tl.store(out + (base + (k - 1) * N) * S + i, c, mask=i < S)
        product, added = next_product, next_added


@triton.jit
def _tanh(x, LIBRARY: tl.constexpr):
    if LIBRARY:
        return libdevice.tanh(x)
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _inputs(inputs, at, wanted, i, H, G: tl.constexpr, KIND: tl.constexpr):
    mask = wanted & (i < H)
    x0 = tl.load(inputs + at * (G * H) + i, mask=mask, other=0.0)
    x1, x2, x3 = x0, x0, x0
    if KIND >= 1:
        x1 = tl.load(inputs + at * (G * H) + H + i, mask=mask, other=0.0)
        x2 = tl.load(inputs + at * (G * H) + 2 * H + i, mask=mask, other=0.0)
    if KIND == 2:
        x3 = tl.load(inputs + at * (G * H) + 3 * H + i, mask=mask, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def follow_on(
    inputs, weights, bias, starts, lengths, states, ends,
    T, N, L, K, H,
    KIND: tl.constexpr, RELU: tl.constexpr, G: tl.constexpr, S_PER_H: tl.constexpr,
    PACKED: tl.constexpr, BIAS: tl.constexpr, LIBRARY: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """The cell through a chunk, from `starts` [D, K, N, S]; writes `states` [D, T, N, S] and `ends` [D, K, N,
    S].

    `inputs` [D, T, N, G, H] is what the inputs contribute to the gates.
    """
    S = S_PER_H * H
    place = tl.program_id(0).to(tl.int64)
    n = place % N
    k = (place // N) % K
    d = place // (N * K)
    i = tl.arange(0, HP)
    w0 = _turned(weights, d, 0, i, i, H, G)
    w1, w2, w3 = w0, w0, w0
    if KIND >= 1:
        w1 = _turned(weights, d, 1, i, i, H, G)
        w2 = _turned(weights, d, 2, i, i, H, G)
    if KIND == 2:
        w3 = _turned(weights, d, 3, i, i, H, G)
    u0 = tl.zeros([HP], dtype=w0.dtype)
    u1, u2, u3 = u0, u0, u0
    if BIAS:
        u0, u1, u2, u3 = _inputs(bias, d, True, i, H, G, KIND)
    first = k * L
    last = tl.minimum(T, first + L)
    if PACKED:
        last = tl.minimum(last, tl.load(lengths + n))
    h = tl.load(starts + place * S + i, mask=i < H, other=0.0)
    m = h
    if KIND == 2:
        m = tl.load(starts + place * S + H + i, mask=i < H, other=0.0)
    base = (d * T) * N + n
    x0, x1, x2, x3 = _inputs(inputs, base + first * N, first < last, i, H, G, KIND)
    y0, y1, y2, y3 = _inputs(inputs, base + (first + 1) * N, first + 1 < last, i, H, G, KIND)
    for t in range(first, last):
        z0, z1, z2, z3 = _inputs(inputs, base + (t + 2) * N, t + 2 < last, i, H, G, KIND)
        p0 = tl.sum(w0 * h[:, None], axis=0) + u0
        if KIND == 0:
            if RELU:
                h = tl.maximum(p0 + x0, 0.0)
            else:
                h = _tanh(p0 + x0, LIBRARY)
        if KIND == 1:
            p1 = tl.sum(w1 * h[:, None], axis=0) + u1
            p2 = tl.sum(w2 * h[:, None], axis=0) + u2
            r = _sigmoid(p0 + x0)
            z = _sigmoid(p1 + x1)
            new = _tanh(x2 + r * p2, LIBRARY)
            h = new + z * (h - new)
        if KIND == 2:
            p1 = tl.sum(w1 * h[:, None], axis=0) + u1
            p2 = tl.sum(w2 * h[:, None], axis=0) + u2
            p3 = tl.sum(w3 * h[:, None], axis=0) + u3
            m = _sigmoid(p1 + x1) * m + _sigmoid(p0 + x0) * _tanh(p2 + x2, LIBRARY)
            h = _sigmoid(p3 + x3) * _tanh(m, LIBRARY)
            tl.store(states + (base + t * N) * S + H + i, m, mask=i < H)
        tl.store(states + (base + t * N) * S + i, h, mask=i < H)
        x0, x1, x2, x3 = y0, y1, y2, y3
        y0, y1, y2, y3 = z0, z1, z2, z3
    tl.store(ends + place * S + i, h, mask=i < H)
    if KIND == 2:
        tl.store(ends + place * S + H + i, m, mask=i < H)


@triton.jit
def gru_values(from_input, from_hidden, before, out, total, H, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Coefficients of a GRU; one thread per hidden unit and step."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < total
    row, i = e // H, e % H
    gates = row * (3 * H) + i
    r = _sigmoid(tl.load(from_input + gates, mask=mask, other=0.0) + tl.load(from_hidden + gates, mask=mask, other=0.0))
    z = _sigmoid(
        tl.load(from_input + gates + H, mask=mask, other=0.0) + tl.load(from_hidden + gates + H, mask=mask, other=0.0)
    )
    pre = tl.load(from_hidden + gates + 2 * H, mask=mask, other=0.0)
    n = _tanh(tl.load(from_input + gates + 2 * H, mask=mask, other=0.0) + r * pre, LIBRARY)
    h = tl.load(before + e, mask=mask, other=0.0)
    of_n = (1 - z) * (1 - n * n)
    to = out + row * (5 * H) + i
    tl.store(to, of_n, mask=mask)
    tl.store(to + H, of_n * pre * r * (1 - r), mask=mask)
    tl.store(to + 2 * H, (h - n) * z * (1 - z), mask=mask)
    tl.store(to + 3 * H, of_n * r, mask=mask)
    tl.store(to + 4 * H, z, mask=mask)


@triton.jit
def lstm_parts(gates, factors, added, total, H, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Forget gates, and what input gates let in."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < total
    place = (e // H) * (4 * H) + e % H
    let_in = _sigmoid(tl.load(gates + place, mask=mask, other=0.0))
    new = _tanh(tl.load(gates + place + 2 * H, mask=mask, other=0.0), LIBRARY)
    tl.store(factors + e, _sigmoid(tl.load(gates + place + H, mask=mask, other=0.0)), mask=mask)
    tl.store(added + e, let_in * new, mask=mask)


@triton.jit
def lstm_values(gates, memory, after, out, total, T, N, H, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Coefficients of an LSTM; `memory` [D, N, H] is that before the first step, `after` that after each."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < total
    row, i = e // H, e % H
    place = row * (4 * H) + i
    let_in = _sigmoid(tl.load(gates + place, mask=mask, other=0.0))
    f = _sigmoid(tl.load(gates + place + H, mask=mask, other=0.0))
    g = _tanh(tl.load(gates + place + 2 * H, mask=mask, other=0.0), LIBRARY)
    o = _sigmoid(tl.load(gates + place + 3 * H, mask=mask, other=0.0))
    first = (row // N) % T == 0
    d, n = row // (N * T), row % N
    c = tl.load(memory + (d * N + n) * H + i, mask=mask & first, other=0.0)
    c += tl.load(after + e - N * H, mask=mask & (first == 0), other=0.0)
    squashed = _tanh(tl.load(after + e, mask=mask, other=0.0), LIBRARY)
    to = out + row * (6 * H) + i
    tl.store(to, o * (1 - squashed * squashed), mask=mask)
    tl.store(to + H, f, mask=mask)
    tl.store(to + 2 * H, g * let_in * (1 - let_in), mask=mask)
    tl.store(to + 3 * H, c * f * (1 - f), mask=mask)
    tl.store(to + 4 * H, let_in * (1 - g * g), mask=mask)
    tl.store(to + 5 * H, squashed * o * (1 - o), mask=mask)


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
