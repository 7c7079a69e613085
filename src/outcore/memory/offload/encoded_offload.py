"""A buffer that is encoded, and whose smaller form is then offloaded.

The memory of the whole is free as soon as it is encoded, that of the smaller form when its copy out is over. For
backward the smaller form is fetched ahead of time, and decoded when it is asked for. What is too small for a copy stays
on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.memory.encode.codecs import Encoded
from outcore.memory.offload.backends import Backend, OffloadedBuffer

__all__ = ["EncodedBuffer"]

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
