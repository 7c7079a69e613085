"""The kernels of `outcore.fusion.optimizer.fused_optimizer`: SGD and Adam with numbers per member.

Each program reads its row of the table, its member's numbers, and steps up to a block of elements. The order of the
numbers is that of `outcore.fusion.optimizer.updates`. No argument may be called `params`: Triton's own wrapper has a
variable of that name.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(table, programs, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    at = tl.load(table + row) + lanes
    own_at = tl.load(table + programs + row) + lanes
    inside = lanes < tl.load(table + 2 * programs + row)
    slot = tl.load(table + 3 * programs + row)
    return at, own_at, inside, slot


@triton.jit
def _sgd(
    weights, grads, buffers, numbers, alive, table, programs, members,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, own_at, inside, slot = _place(table, programs, BLOCK)
    inside = inside & (tl.load(alive + slot) != 0)
    lr = tl.load(numbers + slot)
    decay = tl.load(numbers + members + slot)
    p = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(grads + own_at, mask=inside, other=0.0)
    if MAXIMIZE:
        g = -g
    g += decay * p
    if MOMENTUM:
        momentum = tl.load(numbers + 2 * members + slot)
        keep = tl.load(numbers + 3 * members + slot)
        take = tl.load(numbers + 4 * members + slot)
        buffer = keep * tl.load(buffers + own_at, mask=inside, other=0.0) + take * g
        tl.store(buffers + own_at, buffer, mask=inside)
        g = g + momentum * buffer if NESTEROV else buffer
    tl.store(weights + at, p - lr * g, mask=inside)


@triton.jit
def _adam(
    weights, grads, firsts, seconds, numbers, alive, table, programs, members,
    MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, own_at, inside, slot = _place(table, programs, BLOCK)
    inside = inside & (tl.load(alive + slot) != 0)
    b1 = tl.load(numbers + slot)
    b2 = tl.load(numbers + members + slot)
    size = tl.load(numbers + 2 * members + slot)
    root = tl.load(numbers + 3 * members + slot)
    eps = tl.load(numbers + 4 * members + slot)
    decay = tl.load(numbers + 5 * members + slot)
    shrink = tl.load(numbers + 6 * members + slot)
    p = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(grads + own_at, mask=inside, other=0.0)
    if MAXIMIZE:
        g = -g
    g += decay * p
    first = b1 * tl.load(firsts + own_at, mask=inside, other=0.0) + (1 - b1) * g
    second = b2 * tl.load(seconds + own_at, mask=inside, other=0.0) + (1 - b2) * g * g
    tl.store(firsts + own_at, first, mask=inside)
    tl.store(seconds + own_at, second, mask=inside)
    tl.store(weights + at, p * shrink - size * first / (tl.sqrt(second) / root + eps), mask=inside)


def step(update, numbers, alive, block):
    """Launch the kernel of an update."""
    programs = update.table.shape[1]
    members = numbers.shape[1]
    flags = alive.view(dtype=_byte())
    if update.kind == "sgd":
        buffers = update.state[0] if update.state else update.parameters
        _sgd[(programs,)](
            update.parameters, update.grads, buffers, numbers, flags, update.table, programs, members,
            MOMENTUM=bool(update.state), NESTEROV=update.nesterov, MAXIMIZE=update.maximize, BLOCK=block,
        )  # fmt: skip
    else:
        _adam[(programs,)](
            update.parameters, update.grads, update.state[0], update.state[1], numbers, flags, update.table,
            programs, members, MAXIMIZE=update.maximize, BLOCK=block,
        )  # fmt: skip


def _byte():
    import torch

    return torch.uint8
