"""Encodes saved tensors, and decodes them again (`outcore.ops.recompute_encode` says which codec fits what).

A codec works on the raw elements of a storage in memory order, so a view or another memory format needs no care: what
comes back has the old strides on the new elements.

The smaller form may be offloaded in turn (`EncodedBuffer`). The memory of the whole is free as soon as it is encoded,
that of the smaller form when its copy out is over. For backward the smaller form is fetched ahead of time, and decoded
when it is asked for. What is too small for a copy stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.bitmask import pack_bits, unpack_bits
from outcore.memory.encode.pool_positions import indices_of, positions_of
from outcore.memory.encode.sparse_quantize import NonZeros, grouped, halved, without_zeros
from outcore.memory.offload.backends import Backend, OffloadedBuffer


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoded form, and how to decode it."""

    payload: tuple[torch.Tensor, ...]
    decode: Callable[..., torch.Tensor]
    """From the payload to all elements, as one flat tensor."""

    def decoded(self) -> torch.Tensor:
        """The elements again."""
        return self.decode(*self.payload)


def encode(
    codec: str,
    flat: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    window: PoolWindow | None = None,
    survey: NonZeros | None = None,
) -> Encoded:
    """The encoded form of a flat tensor of elements.

    Args:
        codec: one of `outcore.ops.recompute_encode.CODECS`.
        flat: the elements of a storage.
        indices: the tensor that fills this storage, for the codec "window".
        window: of the pool, for the codec "window".
        survey: the count of nonzeros of the same elements, for the codec "sparse", if it was started before.
    """
    count, dtype = flat.numel(), flat.dtype
    match codec:
        case "sign":
            return Encoded(
                (pack_bits(flat),), lambda bits: unpack_bits(bits, count, bits.new_ones((), dtype=torch.int8))
            )
        case "bits":
            level = flat.max() if count and dtype is not torch.bool else flat.new_ones(())
            return Encoded((pack_bits(flat), level), lambda bits, level: unpack_bits(bits, count, level))
        case "window":
            assert window is not None and indices is not None
            return Encoded((positions_of(indices, window),), lambda positions: indices_of(positions, window))
        case "sparse":
            return Encoded(*without_zeros(flat, survey))
        case "half":
            return Encoded(*halved(flat, torch.float16))
        case "bf16":
            return Encoded(*halved(flat, torch.bfloat16))
        case "int8":
            return Encoded(*grouped(flat))
        case "int4":
            return Encoded(*grouped(flat, bits=4))
    raise ValueError(f"no codec {codec!r}")


_LEAST_BYTES = 4096


class EncodedBuffer:
    """The encoded pieces of one buffer, offloaded, and how to decode them."""

    def __init__(
        self,
        coded: Encoded,
        tier: Backend,
        bytes_of: Callable[[torch.Tensor], torch.Tensor],
        over: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.decode, self.over = coded.decode, over
        self.payload: tuple[torch.Tensor, ...] | None = coded.payload
        self.shapes = tuple(torch.empty_like(t, device="meta") for t in coded.payload)
        self.buffers: tuple[OffloadedBuffer | torch.Tensor, ...] = tuple(
            tier.evict(bytes_of(t)) if t.nbytes >= _LEAST_BYTES else t for t in coded.payload
        )

    def wait_out(self) -> None:
        """Let what is computed from here on come after the copies out, and drop the pieces on the device."""
        if self.payload is not None:
            for buffer in self.buffers:
                if not isinstance(buffer, torch.Tensor):
                    buffer.wait_out()
            self.payload = None

    def fetch(self) -> None:
        """Start to copy the pieces back."""
        if self.payload is None:
            for buffer in self.buffers:
                if not isinstance(buffer, torch.Tensor):
                    buffer.fetch()

    def bytes_back(self) -> torch.Tensor:
        """All elements, decoded."""
        if self.payload is not None:
            return self.decode(*self.payload)
        pieces = [
            buffer if isinstance(buffer, torch.Tensor) else self.over(buffer.bytes_back(), shape)
            for buffer, shape in zip(self.buffers, self.shapes, strict=True)
        ]
        return self.decode(*pieces)
