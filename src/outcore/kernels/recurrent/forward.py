"""Triton kernel of the cells forward: a program takes 16 sequences through one chunk, state in registers.

As in `outcore.kernels.recurrent.backward`, in the other direction: a chunk's first state is given, or guessed by a
warm-up over the steps before it. This module imports Triton and is imported only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from outcore.kernels.recurrent.backward import _load, _store, _weights
from outcore.kernels.recurrent.gates import _sigmoid, _tanh
from outcore.kernels.recurrent.tile_product import _dot


@triton.jit
def _gates(base, mask, H: tl.constexpr, KIND: tl.constexpr):
    """What belongs to up to four gates; what a kind has not is a copy of the first."""
    x0 = tl.load(base, mask=mask, other=0.0)
    x1, x2, x3 = x0, x0, x0
    if KIND >= 1:
        x1 = tl.load(base + H, mask=mask, other=0.0)
        x2 = tl.load(base + 2 * H, mask=mask, other=0.0)
    if KIND == 2:
        x3 = tl.load(base + 3 * H, mask=mask, other=0.0)
    return x0, x1, x2, x3


@triton.jit
def _on(
    h, m, now, w0, w1, w2, w3, u0, u1, u2, u3,
    KIND: tl.constexpr, RELU: tl.constexpr, LIBRARY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the cell."""
    x0, x1, x2, x3 = now
    p0 = _dot(h, w0, PRECISION) + u0
    if KIND == 0:
        if RELU:
            h = p0 + x0
            h = tl.where(h <= 0, 0.0, h)  # what is not a number stays so
        else:
            h = _tanh(p0 + x0, LIBRARY)
    if KIND == 1:
        p1 = _dot(h, w1, PRECISION) + u1
        p2 = _dot(h, w2, PRECISION) + u2
        z = _sigmoid(p1 + x1)
        new = _tanh(x2 + _sigmoid(p0 + x0) * p2, LIBRARY)
        h = new + z * (h - new)
    if KIND == 2:
        p1 = _dot(h, w1, PRECISION) + u1
        p2 = _dot(h, w2, PRECISION) + u2
        p3 = _dot(h, w3, PRECISION) + u3
        m = _sigmoid(p1 + x1) * m + _sigmoid(p0 + x0) * _tanh(p2 + x2, LIBRARY)
        h = _sigmoid(p3 + x3) * _tanh(m, LIBRARY)
    return h, m


@triton.jit(do_not_specialize=["T", "N", "L", "WARM", "K", "tiles"])
def sweep_on(
    inputs, weights, bias, starts, lengths, states, guesses, ends, final, guard,
    T, N, L, WARM, K, tiles,
    H: tl.constexpr, KIND: tl.constexpr, RELU: tl.constexpr, G: tl.constexpr, S: tl.constexpr, WRITTEN: tl.constexpr,
    PACKED: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr, WATCHED: tl.constexpr, LIBRARY: tl.constexpr,
    PRECISION: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All states, from what the inputs contribute to the gates, `inputs` [D, T, N, G, H].

    `states` [D, T, N, WRITTEN] gets h, or if WRITTEN is S also the memory (zero where a sequence has ended),
    `final` [D, N, S] the states after the last step. A chunk starts from `starts` [D, K, N, S] (GIVEN), or WARM steps
    before from zero, or from `starts` [D, N, S] where the sequence begins among them. WATCHED: what each chunk began
    with is written to `guesses` [D, K, N, S], what it ended with to `ends`.
    """
    if tl.load(guard) == 0:
        return
    pid = tl.program_id(0)
    tile = pid % tiles
    k = (pid // tiles) % K
    d = (pid // (tiles * K)).to(tl.int64)
    i = tl.arange(0, HP)[None, :]
    n = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    inside = (n < N) & (i < H)
    w0, w1, w2, w3 = _weights(weights, d, i, tl.arange(0, HP)[:, None], H, G, KIND)
    u0, u1, u2, u3 = _gates(bias + d * (G * H) + i, (i < H) & BIAS, H, KIND)
    first = k * L
    last = tl.minimum(T, first + L)
    begin = first
    length = tl.full([ROWS, 1], 0, tl.int32) + T
    if PACKED:
        length = tl.load(lengths + n, mask=n < N, other=0).to(tl.int32)
    if GIVEN:
        at = starts + ((d * K + k) * N + n) * S + i
        known = inside
    else:
        begin = tl.maximum(0, first - WARM)
        at = starts + (d * N + n) * S + i
        known = inside & (begin == 0)
    h, m = _load(at, known, H, KIND)
    for t in tl.range(begin, first, num_stages=STAGES):
        now = _gates(inputs + ((d * T + t) * N + n) * (G * H) + i, inside, H, KIND)
        new, kept = _on(h, m, now, w0, w1, w2, w3, u0, u1, u2, u3, KIND, RELU, LIBRARY, PRECISION)
        if PACKED:
            new, kept = tl.where(t < length, new, h), tl.where(t < length, kept, m)
        h, m = new, kept
    if WATCHED:
        _store(guesses + ((d * K + k) * N + n) * S + i, h, m, inside, H, KIND)
    for t in tl.range(first, last, num_stages=STAGES):
        row = (d * T + t) * N + n
        now = _gates(inputs + row * (G * H) + i, inside, H, KIND)
        new, kept = _on(h, m, now, w0, w1, w2, w3, u0, u1, u2, u3, KIND, RELU, LIBRARY, PRECISION)
        to = states + row * WRITTEN + i
        if PACKED:
            alive = t < length
            tl.store(to, tl.where(alive, new, 0.0), mask=inside)
            if WRITTEN > H:
                tl.store(to + H, tl.where(alive, kept, 0.0), mask=inside)
            new, kept = tl.where(alive, new, h), tl.where(alive, kept, m)
        else:
            tl.store(to, new, mask=inside)
            if WRITTEN > H:
                tl.store(to + H, kept, mask=inside)
        h, m = new, kept
    if WATCHED:
        _store(ends + ((d * K + k) * N + n) * S + i, h, m, inside, H, KIND)
    if k == K - 1:
        _store(final + (d * N + n) * S + i, h, m, inside, H, KIND)
