"""Triton kernels of the backward pass: a program takes 16 sequences through one chunk, state in registers.

The steps of a chunk depend on each other, so what counts is the time of one step: no launch, no trip to
memory for the state, and what later steps need copied to shared memory STAGES - 1 steps before. (A load into
registers that is handed on from step to step is waited for when it is handed on.) A tile of sequences fills a
tensor core.

    sweep_back      gradients back through every chunk, each from a warm-up over the steps after it
    compare         whether every chunk began with what left the next one
    multiply_back   the product of a chunk's Jacobians, a tile of its rows per program
    pass_back       the carries from chunk to chunk through their products

Nothing has to be looked at between two launches: `compare` and `pass_back` leave their finding in a cell on
the device, and each kernel has a cell as its `guard`: it returns at once where that holds zero.

KIND is 0 for an RNN, 1 for a GRU, 2 for an LSTM. Index letters as in `outcore.scan.cells`; HP is H padded to
a power of two. This module imports Triton and is imported only where it is about to be used.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from outcore.kernels.recurrent.tile_product import _columns, _dot, _inputs, _split, _turned_product


@triton.jit
def _weight(weights, d, gate, row, col, H: tl.constexpr, G: tl.constexpr):
    """The recurrent weights of one gate, of its units `row` for hidden units `col`."""
    return tl.load(weights + (d * G + gate) * H * H + row * H + col, mask=(row < H) & (col < H), other=0.0)


@triton.jit
def _weights(weights, d, row, col, H: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr):
    """Those of up to four gates; what a kind has not is a copy of the first."""
    w0 = _weight(weights, d, 0, row, col, H, G)
    w1, w2, w3 = w0, w0, w0
    if KIND >= 1:
        w1 = _weight(weights, d, 1, row, col, H, G)
        w2 = _weight(weights, d, 2, row, col, H, G)
    if KIND == 2:
        w3 = _weight(weights, d, 3, row, col, H, G)
    return w0, w1, w2, w3


@triton.jit
def _load(at, mask, H: tl.constexpr, KIND: tl.constexpr):
    """A state: h, and an LSTM's memory, else a copy."""
    h = tl.load(at, mask=mask, other=0.0)
    m = h
    if KIND == 2:
        m = tl.load(at + H, mask=mask, other=0.0)
    return h, m


@triton.jit
def _store(at, h, m, mask, H: tl.constexpr, KIND: tl.constexpr):
    tl.store(at, h, mask=mask)
    if KIND == 2:
        tl.store(at + H, m, mask=mask)


@triton.jit
def _step(values, grads, at, mask, i, H: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr):
    """The output gradient and up to six coefficients at places `at` [R, 1]; what a kind has not is a copy of the
    first."""
    g = tl.load(grads + at * H + i, mask=mask, other=0.0)
    base = values + at * (M * H) + i
    v0 = tl.load(base, mask=mask, other=0.0)
    v1, v2, v3, v4, v5 = v0, v0, v0, v0, v0
    if KIND >= 1:
        v1 = tl.load(base + H, mask=mask, other=0.0)
        v2 = tl.load(base + 2 * H, mask=mask, other=0.0)
        v3 = tl.load(base + 3 * H, mask=mask, other=0.0)
        v4 = tl.load(base + 4 * H, mask=mask, other=0.0)
    if KIND == 2:
        v5 = tl.load(base + 5 * H, mask=mask, other=0.0)
    return g, v0, v1, v2, v3, v4, v5


@triton.jit
def _back(
    c, m, keep, now, w0, w1, w2, w3,
    KIND: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step back: what is carried out of it, and the gradients to write down (d·g of an RNN; q of an
    LSTM's memory). The gradient of the output counts `keep` times."""
    g, a0, a1, a2, a3, a4, a5 = now
    g = c + keep * g
    q = m
    if KIND == 0:
        if RELU:
            g = tl.where(a0 <= 0, 0.0, g)  # what is not a number lets it through, as in torch
        else:
            g = g * (1 - a0 * a0)
        c = _dot(g, w0, PRECISION)
    if KIND == 1:
        c = _dot(g * a1, w0, PRECISION) + _dot(g * a2, w1, PRECISION) + _dot(g * a3, w2, PRECISION) + g * a4
    if KIND == 2:
        q = m + g * a0
        c = _dot(g * a5, w3, PRECISION) + _dot(q * a2, w0, PRECISION)
        c += _dot(q * a3, w1, PRECISION) + _dot(q * a4, w2, PRECISION)
        m = q * a1
    return c, m, g, q


@triton.jit(do_not_specialize=["T", "N", "L", "WARM", "K", "tiles", "shares"])
def sweep_back(
    values, weights, grads, carries, last_carry, lengths, x, before, totals, guesses, out, start, sizes, parts, guard,
    T, N, L, WARM, K, tiles, shares,
    H: tl.constexpr, KIND: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    IN: tl.constexpr, PACKED: tl.constexpr, GIVEN: tl.constexpr, WATCHED: tl.constexpr, STORED: tl.constexpr,
    SUMMED: tl.constexpr, PRECISION: tl.constexpr, HP: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of all states: `totals` [D, T, N, S] (where STORED), of the first `start` [D, N, S].

    A chunk's carry is given (`carries` [D, K, N, S]), or comes from WARM steps after it, which start from zero,
    or from `last_carry` [D, N, S] where the sequence ends among them. WATCHED: what each chunk began with is
    written to `guesses` [D, K, N, S], what left it to `out`, and the largest number of the latter to `sizes`,
    one per program. SUMMED: the gradients of the weights of an RNN, whose values are its states, from inputs `x` [D,
    T, N, I] and the states `before` [D, N, H], to `parts` [D, shares, H, RIGHT]; see `weight_gradients`.
    """
    if tl.load(guard) == 0:
        return
    pid = tl.program_id(0)
    tile = pid % tiles
    k = (pid // tiles) % K
    d = (pid // (tiles * K)).to(tl.int64)
    i = tl.arange(0, HP)[None, :]
    n = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    w0, w1, w2, w3 = _weights(weights, d, tl.arange(0, HP)[:, None], i, H, G, KIND)
    inside = (n < N) & (i < H)
    first = k * L
    last = tl.minimum(T, first + L)
    begin = last
    length = tl.full([ROWS, 1], 0, tl.int32) + T
    if PACKED:
        length = tl.load(lengths + n, mask=n < N, other=0).to(tl.int32)
    if GIVEN:
        at = carries + ((d * K + k) * N + n) * S + i
        known = inside
    else:
        begin = tl.minimum(T, last + WARM)
        at = last_carry + (d * N + n) * S + i
        known = inside & (length <= begin)
    c, m = _load(at, known, H, KIND)
    for s in tl.range(0, begin - last, num_stages=STAGES):
        t = begin - 1 - s
        now = _step(values, grads, (d * T + t) * N + n, inside, i, H, M, KIND)
        new, kept, _, _ = _back(c, m, 1.0, now, w0, w1, w2, w3, KIND, RELU, PRECISION)
        if PACKED:
            new, kept = tl.where(t < length, new, c), tl.where(t < length, kept, m)
        c, m = new, kept
    if WATCHED:
        _store(guesses + ((d * K + k) * N + n) * S + i, c, m, inside, H, KIND)
    col = tl.arange(0, RIGHT)[None, :]
    total = tl.zeros([HP, RIGHT], dtype=w0.dtype)
    later = _split(tl.zeros([ROWS, HP], dtype=w0.dtype), PRECISION)
    for s in tl.range(0, last - first, num_stages=STAGES):
        t = last - 1 - s
        row = (d * T + t) * N + n
        now = _step(values, grads, row, inside, i, H, M, KIND)
        if SUMMED:  # the gradient of the step after this one and the state before it, which is this one's
            h = now[1]
            if RIGHT != HP:
                h = tl.load(values + row * H + col, mask=(n < N) & (col < H), other=0.0)
            u = _inputs(x + (row + N) * IN, (n < N) & (s > 0), col, H, IN)
            total += _turned_product(later, _split(_columns(h, u, col, H, IN), PRECISION), PRECISION)
        new, kept, g, q = _back(c, m, 1.0, now, w0, w1, w2, w3, KIND, RELU, PRECISION)
        if PACKED:
            alive = t < length
            new, kept = tl.where(alive, new, c), tl.where(alive, kept, m)
            g, q = tl.where(alive, g, 0.0), tl.where(alive, q, 0.0)
        if STORED:
            _store(totals + row * S + i, g, q, inside, H, KIND)
        c, m = new, kept
        later = _split(g, PRECISION)
    if k == 0:
        _store(start + (d * N + n) * S + i, c, m, inside, H, KIND)
    if WATCHED:
        _store(out + ((d * K + k) * N + n) * S + i, c, m, inside, H, KIND)
        size = tl.max(tl.abs(c))
        if KIND == 2:
            size = tl.maximum(size, tl.max(tl.abs(m)))
        tl.store(sizes + pid, tl.where(k > 0, size, 0.0))  # nothing starts from what leaves the first chunk
    if SUMMED:
        states = before + (d * N + n) * H
        if k > 0:
            states = values + ((d * T + first - 1) * N + n) * H
        h = tl.load(states + col, mask=(n < N) & (col < H), other=0.0)
        u = _inputs(x + ((d * T + first) * N + n) * IN, n < N, col, H, IN)
        total += _turned_product(later, _split(_columns(h, u, col, H, IN), PRECISION), PRECISION)
        j = tl.arange(0, HP)[:, None]
        for share in range(k * tiles + tile, shares, K * tiles):  # shares that no program has are zero
            tl.store(parts + ((d * shares + share) * H + j) * RIGHT + col, total, mask=j < H)
            total = tl.zeros_like(total)


@triton.jit(do_not_specialize=["programs", "N", "K"])
def compare(
    guesses, out, sizes, guard, unsettled, changes, programs, N, K, near, far,
    S: tl.constexpr, SP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set `unsettled` to one where what a chunk began with is not what left the next one.

    They may differ by `near` (a few ulp) of the largest number of the carry, and by `far` of the largest of all.
    Each program writes the largest difference it saw to `changes`.
    """
    if tl.load(guard) == 0:
        return
    largest = tl.load(sizes + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < programs, other=0.0)
    for first in range(BLOCK, programs, BLOCK):
        e = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(sizes + e, mask=e < programs, other=0.0))
    d = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, SP)
    mask = (row[:, None] < (K - 1) * N) & (i[None, :] < S)
    at = (d * K * N + row[:, None]) * S + i[None, :]
    left = tl.load(out + at + N * S, mask=mask, other=0.0)
    began = tl.load(guesses + at, mask=mask, other=0.0)
    change = tl.abs(left - began)
    change = tl.max(tl.where(change == change, change, float("inf")), axis=1)  # a maximum leaves out what is no number
    size = tl.max(tl.abs(left), axis=1)
    tl.store(changes + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(change))
    right = (change <= near * size + far * tl.max(largest)) & (change < float("inf"))
    if tl.min(right.to(tl.int32)) == 0:
        tl.store(unsettled, 1)


@triton.jit(do_not_specialize=["T", "N", "L", "K"])
def multiply_back(
    values, weights, grads, lengths, out, guard,
    T, N, L, K,
    H: tl.constexpr, KIND: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a chunk does to a carried gradient: row r of `out` [D, K, N, S + 1, S] for the r-th unit vector, the
    last row for zero; only that one adds the gradients of the outputs."""
    if tl.load(guard) == 0:
        return
    place = tl.program_id(0).to(tl.int64)
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    n = place % N
    k = (place // N) % K
    d = place // (N * K)
    i = tl.arange(0, HP)[None, :]
    w0, w1, w2, w3 = _weights(weights, d, tl.arange(0, HP)[:, None], i, H, G, KIND)
    first = k * L
    last = tl.minimum(T, first + L)
    if PACKED:
        last = tl.minimum(last, tl.load(lengths + n))
    inside = i < H
    c = tl.where((i == r) & inside, 1.0, 0.0).to(w0.dtype)
    m = tl.where((i + H == r) & inside, 1.0, 0.0).to(w0.dtype)
    keep = tl.where(r == S, 1.0, 0.0).to(w0.dtype)
    for s in tl.range(0, last - first, num_stages=STAGES):
        now = _step(values, grads, (d * T + last - 1 - s) * N + n, inside, i, H, M, KIND)
        c, m, _, _ = _back(c, m, keep, now, w0, w1, w2, w3, KIND, RELU, PRECISION)
    _store(out + (place * (S + 1) + r) * S + i, c, m, (r <= S) & inside, H, KIND)


@triton.jit(do_not_specialize=["N", "K"])
def pass_back(
    rows, last_carry, out, guard, overflow, N, K,
    S: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Carries into every chunk [D, K, N, S], from the last (`last_carry`, [D, N, S]) to the first; `overflow` is
    set to one where they are not all finite."""
    if tl.load(guard) == 0:
        return
    pid = tl.program_id(0).to(tl.int64)
    n = pid % N
    d = pid // N
    i = tl.arange(0, SP)
    square = i[:, None] * S + i[None, :]
    inside = (i[:, None] < S) & (i[None, :] < S)
    c = tl.load(last_carry + pid * S + i, mask=i < S, other=0.0)
    base = d * K * N + n
    at = (base + (K - 1) * N) * (S + 1) * S
    product = tl.load(rows + at + square, mask=inside, other=0.0)
    added = tl.load(rows + at + S * S + i, mask=i < S, other=0.0)
    tl.store(out + (base + (K - 1) * N) * S + i, c, mask=i < S)
    worst = c * 0
    for j in range(K - 1):
        k = K - 1 - j
        at = (base + (k - 1) * N) * (S + 1) * S
        next_product = tl.load(rows + at + square, mask=inside, other=0.0)
        next_added = tl.load(rows + at + S * S + i, mask=i < S, other=0.0)
        c = tl.sum(c[:, None] * product, axis=0) + added
        tl.store(out + (base + (k - 1) * N) * S + i, c, mask=i < S)
        worst += c * 0  # zero, or not a number from the first overflow on
        product, added = next_product, next_added
    if tl.max((worst != worst).to(tl.int32)) > 0:
        tl.store(overflow, 1)
