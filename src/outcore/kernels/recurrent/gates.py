"""Triton kernels of the gates of all steps, and of the coefficients that come from them.

    gru_values               the coefficients of a GRU in one pass over inputs and states
    lstm_gates, lstm_values  those of an LSTM, before and after the recurrence of its memories

Index letters as in `outcore.scan.cells`; HP is H padded to a power of two. This module imports Triton and is imported
only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from outcore.kernels.recurrent.tile_product import _dot


@triton.jit
def _tanh(x, LIBRARY: tl.constexpr):
    if LIBRARY:
        return libdevice.tanh(x)
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


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
def _block(x, states, block, end, r, i, q, H: tl.constexpr, IN: tl.constexpr):
    """Inputs and states before of a block of rows."""
    at = tl.cast(block, tl.int64)
    some = r < end - block
    v = tl.load(x + at * IN + (r * IN + q), mask=some & (q < IN), other=0.0)
    return v, tl.load(states + at * H + (r * H + i), mask=some & (i < H), other=0.0)


@triton.jit
def _gru_rows(
    x, states, out, first, end, wr, wz, wn, ur, uz, un, br, bz, bn, cn,
    H: tl.constexpr, IN: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, IP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)[:, None]
    i, q = tl.arange(0, HP)[None, :], tl.arange(0, IP)[None, :]
    now = _block(x, states, first, end, r, i, q, H, IN)
    for block in range(first, end, BLOCK):
        at = tl.cast(block, tl.int64)
        inside = (r < end - block) & (i < H)
        soon = _block(x, states, block + BLOCK, end, r, i, q, H, IN)
        v, h = now
        reset = _sigmoid(_dot(v, wr, PRECISION, 1) + _dot(h, ur, PRECISION, 1) + br)
        z = _sigmoid(_dot(v, wz, PRECISION, 1) + _dot(h, uz, PRECISION, 1) + bz)
        pre = _dot(h, un, PRECISION, 1) + cn
        n = _tanh(_dot(v, wn, PRECISION, 1) + bn + reset * pre, LIBRARY)
        of_n = (1 - z) * (1 - n * n)
        to = out + at * (5 * H) + (r * (5 * H) + i)
        tl.store(to, of_n, mask=inside)
        tl.store(to + H, of_n * pre * reset * (1 - reset), mask=inside)
        tl.store(to + 2 * H, (h - n) * z * (1 - z), mask=inside)
        tl.store(to + 3 * H, of_n * reset, mask=inside)
        tl.store(to + 4 * H, z, mask=inside)
        now = soon


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
    now = _block(x, states, first, end, r, i, q, H, IN)
    for block in range(first, end, BLOCK):
        at = tl.cast(block, tl.int64)
        inside = (r < end - block) & (i < H)
        soon = _block(x, states, block + BLOCK, end, r, i, q, H, IN)
        v, h = now
        let_in = _sigmoid(_dot(v, wi, PRECISION, 1) + _dot(h, ui, PRECISION, 1) + bi)
        f = _sigmoid(_dot(v, wf, PRECISION, 1) + _dot(h, uf, PRECISION, 1) + bf)
        new = _tanh(_dot(v, wg, PRECISION, 1) + _dot(h, ug, PRECISION, 1) + bg, LIBRARY)
        o = _sigmoid(_dot(v, wo, PRECISION, 1) + _dot(h, uo, PRECISION, 1) + bo)
        to = gates + at * (4 * H) + (r * (4 * H) + i)
        tl.store(to, let_in, mask=inside)
        tl.store(to + H, f, mask=inside)
        tl.store(to + 2 * H, new, mask=inside)
        tl.store(to + 3 * H, o, mask=inside)
        to = at * H + (r * H + i)
        tl.store(factors + to, f, mask=inside)
        tl.store(added + to, let_in * new, mask=inside)
        now = soon


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


@triton.jit(do_not_specialize=["R", "N"])
def lstm_values(
    gates, memory, after, out, R, N, H: tl.constexpr, LIBRARY: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Coefficients of an LSTM [D, R, 6, H]; `memory` [D, N, H] is that before the first step, `after` [D, R, H] that
    after each."""
    first = (tl.program_id(0) * BLOCK).to(tl.int64)
    d = tl.program_id(1).to(tl.int64)
    r, i = tl.arange(0, BLOCK)[:, None], tl.arange(0, HP)[None, :]
    inside = (r < R - first) & (i < H)
    at = (d * R + first) * H + (r * H + i)
    place = gates + (d * R + first) * (4 * H) + (r * (4 * H) + i)
    let_in = tl.load(place, mask=inside, other=0.0)
    f = tl.load(place + H, mask=inside, other=0.0)
    g = tl.load(place + 2 * H, mask=inside, other=0.0)
    o = tl.load(place + 3 * H, mask=inside, other=0.0)
    begins = r < N - first
    c = tl.load(after + at - N * H, mask=inside & (begins == 0), other=0.0)
    c += tl.load(memory + (d * N + first) * H + (r * H + i), mask=inside & begins, other=0.0)
    squashed = _tanh(tl.load(after + at, mask=inside, other=0.0), LIBRARY)
    to = out + (d * R + first) * (6 * H) + (r * (6 * H) + i)
    tl.store(to, o * (1 - squashed * squashed), mask=inside)
    tl.store(to + H, f, mask=inside)
    tl.store(to + 2 * H, g * let_in * (1 - let_in), mask=inside)
    tl.store(to + 3 * H, c * f * (1 - f), mask=inside)
    tl.store(to + 4 * H, let_in * (1 - g * g), mask=inside)
    tl.store(to + 5 * H, squashed * o * (1 - o), mask=inside)
