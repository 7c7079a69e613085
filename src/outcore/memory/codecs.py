"""Encodes what backward keeps, and decodes it again (`outcore.ops.encoding` says which codec fits what).

A codec works on the raw elements of a storage in the order in which they lie in memory, so a view or another memory
format needs no care: what comes back has the old strides on the new elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.ops.encoding import GROUP

__all__ = ["Coded", "Window", "encode", "pack_bits", "unpack_bits", "window_of"]

_CHUNK = 2**14
"""Elements that are coded at a time where it takes more memory on the way than in the end."""


_PART = (2**18, 2**24)
"""Numbers that are rounded at a time, on a CPU and on a GPU."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a pool, per dimension of the image."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    image: tuple[int, ...]
    """Size of the pool's input."""

    @property
    def fits(self) -> bool:
        """Whether a position in the window is one byte."""
        return math.prod(self.kernel) <= 256


@dataclass(frozen=True, slots=True)
class Coded:
    """The smaller form, and the way back."""

    payload: tuple[torch.Tensor, ...]
    decode: Callable[..., torch.Tensor]
    """From the payload to all elements, as one flat tensor."""

    def decoded(self) -> torch.Tensor:
        """The elements again."""
        return self.decode(*self.payload)


def encode(
    codec: str, flat: torch.Tensor, *, indices: torch.Tensor | None = None, window: Window | None = None
) -> Coded:
    """The smaller form of a flat tensor of elements.

    Args:
        codec: one of `outcore.ops.encoding.CODECS`.
        flat: the elements of a storage.
        indices: the tensor that fills this storage, for the codec "window".
        window: of the pool, for the codec "window".
    """
    count, dtype = flat.numel(), flat.dtype
    match codec:
        case "sign":
            bits = pack_bits(flat)
            return Coded((bits,), lambda bits: unpack_bits(bits, count, torch.ones((), dtype=torch.int8)))
        case "bits":
            level = flat.max() if count else flat.new_ones(())
            return Coded((pack_bits(flat), level), lambda bits, level: unpack_bits(bits, count, level))
        case "window":
            assert window is not None and indices is not None
            return Coded((_positions(indices, window),), lambda positions: _indices(positions, window))
        case "sparse":
            return _without_zeros(flat)
        case "half":
            return Coded((flat.to(torch.float16),), lambda half: half.to(dtype))
        case "bf16":
            return Coded((flat.to(torch.bfloat16),), lambda half: half.to(dtype))
        case "int8":
            return _grouped(flat)
    raise ValueError(f"no codec {codec!r}")


# Bits


def pack_bits(flat: torch.Tensor) -> torch.Tensor:
    """Which elements are above zero, eight to a byte."""
    count = flat.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=flat.device)
    if flat.is_cuda:
        from outcore.memory.triton_kernels import pack

        pack(flat, packed)
        return packed
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK] > 0
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
        from outcore.memory.triton_kernels import unpack

        unpack(bits, out, float(level) if level.device.type == "cpu" else level)
        return out
    for start in range(0, count, _CHUNK):
        part = bits[start // 8 : (start + _CHUNK) // 8]
        eights = torch.empty(part.numel(), 8, dtype=torch.uint8)
        for bit in range(8):
            torch.bitwise_and(part >> bit, 1, out=eights[:, bit])
        target = out[start : start + _CHUNK]
        target.copy_(eights.view(-1)[: target.numel()])
        if level.dtype is not torch.bool and level.dtype is not torch.int8:
            target.mul_(level)
    return out


# Positions in a window


def _positions(indices: torch.Tensor, window: Window) -> torch.Tensor:
    """Where in its window each maximum lies."""
    small = torch.empty_like(indices, dtype=torch.uint8)
    if indices.is_cuda:
        from outcore.memory.triton_kernels import to_positions

        to_positions(indices, small, window)
        return small
    for index, position in _rows(indices, small, window):
        rest, code, radix = index, torch.zeros((), dtype=torch.int64), 1
        for dim in reversed(range(len(window.image))):
            size = window.image[dim]
            at, rest = rest % size, torch.div(rest, size, rounding_mode="floor")
            offset = (at - _origin(indices, window, dim)) // window.dilation[dim]
            code, radix = code + offset * radix, radix * window.kernel[dim]
        position.copy_(code)
    return small


def _indices(positions: torch.Tensor, window: Window) -> torch.Tensor:
    """The index in the image of each position in its window."""
    whole = torch.empty_like(positions, dtype=torch.int64)
    if positions.is_cuda:
        from outcore.memory.triton_kernels import to_indices

        to_indices(positions, whole, window)
        return whole
    for position, index in _rows(positions, whole, window):
        rest = position.to(torch.int64)
        found, scale = torch.zeros((), dtype=torch.int64), 1
        for dim in reversed(range(len(window.image))):
            kernel = window.kernel[dim]
            offset, rest = rest % kernel, torch.div(rest, kernel, rounding_mode="floor")
            found = found + (_origin(positions, window, dim) + offset * window.dilation[dim]) * scale
            scale *= window.image[dim]
        index.copy_(found)
    return whole


def _rows(a: torch.Tensor, b: torch.Tensor, window: Window) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors image by image, a few channels at a time, so that little memory is needed on the way."""
    if a.dim() <= len(window.image) + 1:
        yield a, b
        return
    step = max(1, _CHUNK // max(1, math.prod(a.shape[2:])))
    for image in range(a.shape[0]):
        for start in range(0, a.shape[1], step):
            yield a[image, start : start + step], b[image, start : start + step]


def _origin(like: torch.Tensor, window: Window, dim: int) -> torch.Tensor:
    """Where the window of each output begins, along one dimension, shaped to broadcast."""
    dims = len(window.image)
    size = like.shape[like.dim() - dims + dim]
    origin = torch.arange(size, device=like.device) * window.stride[dim] - window.padding[dim]
    return origin.view(-1, *[1] * (dims - 1 - dim))


# Fewer bits per number


def _grouped(flat: torch.Tensor) -> Coded:
    """Eight bits per number, with a range for every group of numbers (lossy)."""
    count, dtype = flat.numel(), flat.dtype
    groups = -(-count // GROUP)
    codes = torch.empty(count, dtype=torch.uint8, device=flat.device)
    low, scale = (torch.empty(groups, 1, dtype=torch.float32, device=flat.device) for _ in range(2))
    for start, rows in _group_rows(flat):
        part = slice(start // GROUP, start // GROUP + rows.shape[0])
        torch.amin(rows, 1, keepdim=True, out=low[part])
        width = rows.amax(1, keepdim=True).sub_(low[part]).div_(255)
        scale[part] = width.clamp_min_(torch.finfo(torch.float32).tiny)
        levels = rows.sub_(low[part]).div_(scale[part]).round_()
        codes[start : start + levels.numel()] = levels.view(-1)[: count - start].to(torch.uint8)

    def decode(codes: torch.Tensor, low: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = torch.empty(count, dtype=dtype, device=codes.device)
        for start, rows in _group_rows(codes):
            part = slice(start // GROUP, start // GROUP + rows.shape[0])
            out[start : start + rows.numel()] = rows.mul_(scale[part]).add_(low[part]).view(-1)[: count - start]
        return out

    return Coded((codes, low, scale), decode)


def _group_rows(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers group by group, as float32, some at a time: with where they begin; the last group is filled up."""
    count, step = flat.numel(), _PART[flat.device.type == "cuda"]
    for start in range(0, count, step):
        part = flat[start : start + step].to(torch.float32, copy=True)
        if part.numel() % GROUP:
            part = torch.cat([part, part[-1:].expand(-part.numel() % GROUP)])
        yield start, part.view(-1, GROUP)


def _without_zeros(flat: torch.Tensor) -> Coded:
    """Which numbers are not zero, and those (Gist's sparse storage): exact, as small as the data allow."""
    count, dtype = flat.numel(), flat.dtype
    words = flat.view(_WORDS[dtype.itemsize])  # bits, so that -0.0 comes back as it was
    there = words != 0
    bits, values = pack_bits(there.view(torch.uint8)), words[there]

    def decode(bits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        flags = unpack_bits(bits, count, torch.ones((), dtype=torch.int8)).view(torch.bool)
        return values.new_zeros(count).masked_scatter_(flags, values).view(dtype)

    return Coded((bits, values), decode)


def window_of(call: Any, image: Sequence[int]) -> Window | None:
    """The window of a max pool, from the module or the arguments of the function."""
    dims = len(image)

    def wide(value: Any) -> tuple[int, ...]:
        return (int(value),) * dims if isinstance(value, int) else tuple(int(v) for v in value)

    kernel = wide(call["kernel_size"])
    stride = wide(call["stride"]) if call.get("stride") not in (None, ()) else kernel
    return Window(kernel, stride, wide(call.get("padding", 0)), wide(call.get("dilation", 1)), tuple(image))
