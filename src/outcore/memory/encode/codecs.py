"""Encodes saved tensors, and decodes them again (`outcore.ops.recompute_encode` says which codec fits what).

A codec works on the raw elements of a storage in memory order, so a view or another memory format needs no care: what
comes back has the old strides on the new elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outcore.memory.encode.bitmask import pack_bits, unpack_bits
from outcore.memory.encode.pool_positions import PoolWindow, indices_of, positions_of, window_of
from outcore.memory.encode.sparse_quantize import NonZeros, grouped, halved, without_zeros

__all__ = ["Encoded", "NonZeros", "PoolWindow", "encode", "pack_bits", "unpack_bits", "window_of"]


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
