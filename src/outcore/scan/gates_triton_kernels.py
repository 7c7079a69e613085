"""Triton kernels of the cells themselves: forward through a chunk, and their coefficients for all steps.

    follow_on                the cell through a chunk, one sequence per program, state and weights in registers
    gru_values               the coefficients of a GRU in one pass over inputs and states
    lstm_gates, lstm_values  those of an LSTM, before and after the recurrence of its memories

KIND is 0 for an RNN, 1 for a GRU, 2 for an LSTM. Index letters as in `outcore.scan.cells`; HP is H padded to a
power of two. This module imports Triton and is imported only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from outcore.scan.sweep_triton_kernels import _dot

__all__ = ["follow_on", "gru_values", "lstm_gates", "lstm_values"]


@triton.jit
def _turned(weights, d, gate, rows, cols, H, G: tl.constexpr):
    """The same transposed: sums over the first dimension of a tile need the fewest exchanges between threads."""
    place = (d * G + gate) * H * H + cols[None, :] * H + rows[:, None]
    return tl.load(weights + place, mask=(rows[:, None] < H) & (cols[None, :] < H), other=0.0)


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
def _gate(
    weights, biases, d, gate, rows, cols, SIZE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, BIAS: tl.constexpr
):
    """Transposed weights [size, unit of the gate] and biases of one gate."""
    unit = (d * G + gate) * H + cols
    w = tl.load(
        weights + unit[None, :] * SIZE + rows[:, None], mask=(cols[None, :] < H) & (rows[:, None] < SIZE), other=0.0
    )
    b = tl.zeros_like(cols).to(w.dtype)
    if BIAS:
        b = tl.load(biases + unit, mask=cols < H, other=0.0)
    return w, b[None, :]


@triton.jit
def _gru_rows(
    x, states, out, first, end, wr, wz, wn, ur, uz, un, br, bz, bn, cn,
    H: tl.constexpr, IN: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, IP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)[:, None]
    i, q = tl.arange(0, HP)[None, :], tl.arange(0, IP)[None, :]
    for block in range(first, end, BLOCK):
        at = tl.cast(block, tl.int64)
        some = r < end - block
        inside = some & (i < H)
        h = tl.load(states + at * H + (r * H + i), mask=inside, other=0.0)
        v = tl.load(x + at * IN + (r * IN + q), mask=some & (q < IN), other=0.0)
        reset = _sigmoid(_dot(v, wr, PRECISION) + _dot(h, ur, PRECISION) + br)
        z = _sigmoid(_dot(v, wz, PRECISION) + _dot(h, uz, PRECISION) + bz)
        pre = _dot(h, un, PRECISION) + cn
        n = _tanh(_dot(v, wn, PRECISION) + bn + reset * pre, LIBRARY)
        of_n = (1 - z) * (1 - n * n)
        to = out + at * (5 * H) + (r * (5 * H) + i)
        tl.store(to, of_n, mask=inside)
        tl.store(to + H, of_n * pre * reset * (1 - reset), mask=inside)
        tl.store(to + 2 * H, (h - n) * z * (1 - z), mask=inside)
        tl.store(to + 3 * H, of_n * reset, mask=inside)
        tl.store(to + 4 * H, z, mask=inside)


@triton.jit(do_not_specialize=["R", "N", "SHARE"])
def gru_values(
    x, y, before, weights, recurrent, biases, hidden_biases, out, R, N, SHARE,
    H: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, IP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients of a GRU, `out` [D, R, 5, H], from `x` [D, R, I], `y` [D, R, H] and the states `before` [D, N,
    H]; R is steps times N."""
    share = tl.program_id(0)
    d = tl.program_id(1).to(tl.int64)
    i, q = tl.arange(0, HP), tl.arange(0, IP)
    wr, br = _gate(weights, biases, d, 0, q, i, IN, H, 3, BIAS)
    wz, bz = _gate(weights, biases, d, 1, q, i, IN, H, 3, BIAS)
    wn, bn = _gate(weights, biases, d, 2, q, i, IN, H, 3, BIAS)
    ur, cr = _gate(recurrent, hidden_biases, d, 0, i, i, H, H, 3, BIAS)
    uz, cz = _gate(recurrent, hidden_biases, d, 1, i, i, H, H, 3, BIAS)
    un, cn = _gate(recurrent, hidden_biases, d, 2, i, i, H, H, 3, BIAS)
    br, bz = br + cr, bz + cz
    x += d * R * IN
    out += d * R * (5 * H)
    if share == 0:
        _gru_rows(
            x, before + d * N * H, out, N * 0, N, wr, wz, wn, ur, uz, un, br, bz, bn, cn,
            H, IN, LIBRARY, PRECISION, HP, IP, BLOCK,
        )  # fmt: skip
    first = N + share * SHARE
    _gru_rows(
        x, y + (d * R - N) * H, out, first, tl.minimum(R, first + SHARE), wr, wz, wn, ur, uz, un, br, bz, bn, cn,
        H, IN, LIBRARY, PRECISION, HP, IP, BLOCK,
    )  # fmt: skip


@triton.jit
def _lstm_rows(
    x, states, gates, factors, added, first, end, wi, wf, wg, wo, ui, uf, ug, uo, bi, bf, bg, bo,
    H: tl.constexpr, IN: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, IP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)[:, None]
    i, q = tl.arange(0, HP)[None, :], tl.arange(0, IP)[None, :]
    for block in range(first, end, BLOCK):
        at = tl.cast(block, tl.int64)
        some = r < end - block
        inside = some & (i < H)
        h = tl.load(states + at * H + (r * H + i), mask=inside, other=0.0)
        v = tl.load(x + at * IN + (r * IN + q), mask=some & (q < IN), other=0.0)
        let_in = _sigmoid(_dot(v, wi, PRECISION) + _dot(h, ui, PRECISION) + bi)
        f = _sigmoid(_dot(v, wf, PRECISION) + _dot(h, uf, PRECISION) + bf)
        new = _tanh(_dot(v, wg, PRECISION) + _dot(h, ug, PRECISION) + bg, LIBRARY)
        o = _sigmoid(_dot(v, wo, PRECISION) + _dot(h, uo, PRECISION) + bo)
        to = gates + at * (4 * H) + (r * (4 * H) + i)
        tl.store(to, let_in, mask=inside)
        tl.store(to + H, f, mask=inside)
        tl.store(to + 2 * H, new, mask=inside)
        tl.store(to + 3 * H, o, mask=inside)
        to = at * H + (r * H + i)
        tl.store(factors + to, f, mask=inside)
        tl.store(added + to, let_in * new, mask=inside)


@triton.jit(do_not_specialize=["R", "N", "SHARE"])
def lstm_gates(
    x, y, before, weights, recurrent, biases, hidden_biases, gates, factors, added, R, N, SHARE,
    H: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, IP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gates of an LSTM [D, R, 4, H]; apart [D, R, H] the forget gates and what the input gates let in."""
    share = tl.program_id(0)
    d = tl.program_id(1).to(tl.int64)
    i, q = tl.arange(0, HP), tl.arange(0, IP)
    wi, bi = _gate(weights, biases, d, 0, q, i, IN, H, 4, BIAS)
    wf, bf = _gate(weights, biases, d, 1, q, i, IN, H, 4, BIAS)
    wg, bg = _gate(weights, biases, d, 2, q, i, IN, H, 4, BIAS)
    wo, bo = _gate(weights, biases, d, 3, q, i, IN, H, 4, BIAS)
    ui, ci = _gate(recurrent, hidden_biases, d, 0, i, i, H, H, 4, BIAS)
    uf, cf = _gate(recurrent, hidden_biases, d, 1, i, i, H, H, 4, BIAS)
    ug, cg = _gate(recurrent, hidden_biases, d, 2, i, i, H, H, 4, BIAS)
    uo, co = _gate(recurrent, hidden_biases, d, 3, i, i, H, H, 4, BIAS)
    bi, bf, bg, bo = bi + ci, bf + cf, bg + cg, bo + co
    x += d * R * IN
    gates += d * R * (4 * H)
    factors += d * R * H
    added += d * R * H
    if share == 0:
        _lstm_rows(
            x, before + d * N * H, gates, factors, added, N * 0, N, wi, wf, wg, wo, ui, uf, ug, uo, bi, bf, bg, bo,
            H, IN, LIBRARY, PRECISION, HP, IP, BLOCK,
        )  # fmt: skip
    first = N + share * SHARE
    _lstm_rows(
        x, y + (d * R - N) * H, gates, factors, added, first, tl.minimum(R, first + SHARE),
        wi, wf, wg, wo, ui, uf, ug, uo, bi, bf, bg, bo, H, IN, LIBRARY, PRECISION, HP, IP, BLOCK,
    )  # fmt: skip


@triton.jit
def lstm_values(gates, memory, after, out, total, T, N, H, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Coefficients of an LSTM; `memory` [D, N, H] is that before the first step, `after` that after each."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < total
    row, i = e // H, e % H
    place = row * (4 * H) + i
    let_in = tl.load(gates + place, mask=mask, other=0.0)
    f = tl.load(gates + place + H, mask=mask, other=0.0)
    g = tl.load(gates + place + 2 * H, mask=mask, other=0.0)
    o = tl.load(gates + place + 3 * H, mask=mask, other=0.0)
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
