"""A buffer that is encoded, and whose smaller form then leaves the device.

The memory of the whole is free as soon as it is encoded, that of the smaller form when its copy out is over. On the way
back the smaller form is fetched in time, and decoded when backward asks. What is too small for a copy stays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.memory.encode.codecs import Encoded
from outcore.memory.offload.backends import Backend, OffloadedBuffer

__all__ = ["EncodedBuffer"]

_LEAST_BYTES = 4096


class EncodedBuffer:
    """Several pieces on their way out and back, and how to make one of them."""

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
        self.trips: tuple[OffloadedBuffer | torch.Tensor, ...] = tuple(
            tier.evict(bytes_of(t)) if t.nbytes >= _LEAST_BYTES else t for t in coded.payload
        )

    def wait_out(self) -> None:
        """Whatever is computed from here on comes after the copies out; the pieces here are let go."""
        if self.payload is not None:
            for trip in self.trips:
                if not isinstance(trip, torch.Tensor):
                    trip.wait_out()
            self.payload = None

    def fetch(self) -> None:
        """Start to copy the pieces back."""
        if self.payload is None:
            for trip in self.trips:
                if not isinstance(trip, torch.Tensor):
                    trip.fetch()

    def bytes_back(self) -> torch.Tensor:
        """All elements, decoded."""
        if self.payload is not None:
            return self.decode(*self.payload)
        pieces = [
            trip if isinstance(trip, torch.Tensor) else self.over(trip.bytes_back(), shape)
            for trip, shape in zip(self.trips, self.shapes, strict=True)
        ]
        return self.decode(*pieces)
