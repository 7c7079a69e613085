"""Gradients that go home as they arrive and come back for the update.

When backward has brought all gradients of a bucket, they are gathered into one dense piece and copied home; from then
on ``p.grad`` is a view of the home, beside ``p`` itself, for whoever looks at it before the optimizer's step. A second
backward brings them back first, because it adds to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outcore.memory.offload.copy_streams import CopyEvent, CopyStreams
from outcore.memory.offload.host_storage import OffDeviceStorage, home_for
from outcore.memory.param_offload.buckets import Bucket
from outcore.memory.param_offload.flat_buffer import movable

__all__ = ["GradientStorage"]


class GradientStorage:
    """Where the gradients of buckets live between backward and the update."""

    def __init__(self, buckets: list[Bucket], device: torch.device, copy_streams: CopyStreams) -> None:
        self.device, self.copy_streams = device, copy_streams
        self.homes: dict[int, OffDeviceStorage] = {}
        self.leaving: tuple[torch.Tensor, CopyEvent] | None = None
        """Memory that is still being copied home; who comes next waits for it."""
        for bucket in buckets:
            if bucket.trained and bucket.weights is not None:
                self.homes[bucket.number] = home_for(device, bucket.weights.bytes)

    def leave(self, bucket: Bucket) -> torch.Tensor | None:
        """Start to copy the gradients of a bucket home; returns their home, for `stay`, if they can go there."""
        home = self.homes.get(bucket.number)
        assert bucket.weights is not None
        given = [p.grad for p in bucket.trained if p.grad is not None]
        if home is None or not given or any(g.layout is not torch.strided or g.device != self.device for g in given):
            return None
        if self.leaving is not None:
            self.leaving[1].wait()
            self.leaving = None
        flat = _as_it_is(bucket) if len(bucket.trained) == 1 else None
        if flat is None:
            flat = torch.empty(bucket.weights.bytes, dtype=torch.uint8, device=self.device)
            for member in bucket.weights.members:
                if member.tensor.grad is not None:
                    member.over(flat).copy_(member.tensor.grad)
        (mark,) = self.copy_streams.copy([(home.memory[: flat.numel()], flat, (self.copy_streams.now(),))], out=True)
        self.leaving = flat, mark
        return home.memory

    def stay(self, bucket: Bucket, home: torch.Tensor) -> None:
        """``p.grad`` is at home; the parameters must be there too."""
        assert bucket.weights is not None
        for member in bucket.weights.members:
            if member.tensor.grad is not None:
                member.tensor.grad = None
                member.tensor.grad = member.over(home)

    def hold(self, bucket: Bucket, gradients: Mapping[int, torch.Tensor]) -> None:
        """Take gradients (by the id of their parameter) home that were there before; the parameters are there."""
        assert bucket.weights is not None
        if (home := self.homes.get(bucket.number)) is None:
            return
        for member in bucket.weights.members:
            if (grad := gradients.get(id(member.tensor))) is not None:
                view = member.over(home.memory)
                view.copy_(grad)
                member.tensor.grad = view

    def away(self, bucket: Bucket) -> bool:
        """Whether some of its gradients are at home."""
        home = self.homes.get(bucket.number)
        if home is None:
            return False
        here = home.memory.untyped_storage().data_ptr()
        return any(p.grad is not None and p.grad.untyped_storage().data_ptr() == here for p in bucket.trained)

    def come(self, bucket: Bucket) -> None:
        """Bring the gradients of a bucket to the device, where its parameters must be."""
        assert bucket.weights is not None
        self.settle()
        home = self.homes[bucket.number].memory
        flat = torch.empty(bucket.weights.bytes, dtype=torch.uint8, device=self.device)
        (mark,) = self.copy_streams.copy([(flat, home, (self.copy_streams.now(),))], out=False)
        mark.wait()
        start = home.untyped_storage().data_ptr()
        for member in bucket.weights.members:
            grad = member.tensor.grad
            if grad is not None and grad.untyped_storage().data_ptr() == start:
                member.tensor.grad = None
                member.tensor.grad = member.over(flat)

    def settle(self) -> None:
        """The host waits until everything is at home."""
        if self.leaving is not None:
            self.leaving[1].finish()
            self.leaving = None

    def close(self) -> None:
        """Give the homes back."""
        self.settle()
        for home in self.homes.values():
            home.close()
        self.homes = {}


def _as_it_is(bucket: Bucket) -> torch.Tensor | None:
    """The memory of the only gradient of a bucket, where it lies as its home will."""
    (p,) = bucket.trained
    grad = p.grad
    if grad is None or not movable(grad) or (grad.dtype, grad.stride()) != (p.dtype, p.stride()):
        return None
    return torch.empty(0, dtype=torch.uint8, device=grad.device).set_(grad.untyped_storage())
