"""Flags as bits: which numbers are above zero, eight to a byte, and ReLU by them.

ReLU lets a gradient through where its input was not below or at zero; a NaN is neither, and goes through. On a GPU each
of these is one kernel, elsewhere a few elements at a time, so that no mask is ever whole.
"""

from __future__ import annotations

import torch

_CHUNK = 2**14
"""Elements that are coded at a time on a CPU."""


def pack_bits(flat: torch.Tensor) -> torch.Tensor:
    """Which elements are above zero (or NaN), eight to a byte."""
    count = flat.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=flat.device)
    if flat.is_cuda:
        from outcore.kernels.bitmask import pack

        pack(flat, packed)
        return packed
    for start in range(0, count, _CHUNK):
        part = ~(flat[start : start + _CHUNK] <= 0)
        eights = torch.nn.functional.pad(part.view(torch.uint8), (0, -part.numel() % 8)).view(-1, 8)
        bytes_ = packed[start // 8 : start // 8 + eights.shape[0]]
        bytes_.copy_(eights[:, 0])
        for bit in range(1, 8):
            bytes_ |= eights[:, bit] << bit
    return packed


def unpack_bits(bits: torch.Tensor, count: int, level: torch.Tensor) -> torch.Tensor:
    """Zero where a bit is zero, the level where it is one, in the dtype of the level."""
    out = torch.empty(count, dtype=level.dtype, device=bits.device)
    if bits.is_cuda:
        from outcore.kernels.bitmask import unpack

        unpack(bits, out, level)
        return out
    for start in range(0, count, _CHUNK):
        target = out[start : start + _CHUNK]
        target.copy_(_flags(bits, start, target.numel()))
        if level.dtype is not torch.bool and level.dtype is not torch.int8:
            target.mul_(level)
    return out


def _flags(bits: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Some of the flags, a byte each; the first is the lowest bit of a byte."""
    part = bits[start // 8 : -(-(start + count) // 8)]
    eights = torch.empty(part.numel(), 8, dtype=torch.uint8, device="cpu")
    for bit in range(8):
        torch.bitwise_and(part >> bit, 1, out=eights[:, bit])
    return eights.view(-1)[:count]


def rectified(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ReLU of a dense tensor into another of the same layout, or itself; returns the bits of where it let
    through."""
    if x.is_cuda:
        from outcore.kernels.bitmask import rectify

        bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
        rectify(x, out, bits)
        return bits
    torch.clamp_min(_flat(x), 0, out=_flat(out))
    return pack_bits(_flat(out))


def through(gradient: torch.Tensor, bits: torch.Tensor, out: torch.Tensor) -> None:
    """Write a dense gradient into a tensor of the same layout where the bits are one, else zero."""
    if gradient.is_cuda:
        from outcore.kernels.bitmask import through as write

        write(gradient, bits, out)
        return
    source, target, zero = _flat(gradient), _flat(out), gradient.new_zeros(())
    for start in range(0, source.numel(), _CHUNK):
        part = source[start : start + _CHUNK]
        torch.where(_flags(bits, start, part.numel()).view(torch.bool), part, zero, out=target[start : start + _CHUNK])


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order in which they lie in memory."""
    return dense.detach().as_strided((dense.numel(),), (1,))
