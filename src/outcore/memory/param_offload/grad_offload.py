"""Gradients that are offloaded as they are complete and fetched for the update.

When backward has accumulated all gradients of a bucket, they are gathered into one dense piece and copied off the
device. One that is most of its bucket is copied from where it lies, because there may be no room for a second of its
size. From then on ``p.grad`` is a view of off-device storage, as ``p`` itself is, for whoever looks at it before the
optimizer's step. A second backward fetches them first, because it adds to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from outcore.memory.offload.copy_streams import CopyEvent, CopyStreams
from outcore.memory.offload.host_storage import OffDeviceStorage, off_device_storage
from outcore.memory.param_offload.buckets import Bucket
from outcore.memory.param_offload.flat_buffer import FlatBuffer, movable
from outcore.planner.memory.buckets import most_of, rounded


class GradientStorage:
    """Off-device storage of the gradients of buckets, between backward and the update."""

    def __init__(self, buckets: list[Bucket], device: torch.device, copy_streams: CopyStreams) -> None:
        self.device, self.copy_streams = device, copy_streams
        self.storages: dict[int, OffDeviceStorage] = {}
        self.copying_out: tuple[Sequence[torch.Tensor], Sequence[CopyEvent]] | None = None
        """Memory that is still being copied out; the next copy waits for it."""
        for bucket in buckets:
            if bucket.trained and bucket.weights is not None:
                self.storages[bucket.number] = off_device_storage(device, bucket.weights.bytes)

    def offload(self, bucket: Bucket) -> torch.Tensor | None:
        """Start to copy the gradients of a bucket off the device; returns their storage, for `point_grads_at_storage`,
        or None where they cannot be offloaded."""
        storage = self.storages.get(bucket.number)
        assert bucket.weights is not None
        given = [p.grad for p in bucket.trained if p.grad is not None]
        if storage is None or not given or any(g.layout is not torch.strided or g.device != self.device for g in given):
            return None
        if self.copying_out is not None:
            for event in self.copying_out[1]:
                event.wait()
            self.copying_out = None
        parts = self._parts(bucket.weights)
        ready = (self.copy_streams.now(),)
        copies = [(storage.memory[start : start + flat.numel()], flat, ready) for start, flat in parts]
        self.copying_out = [flat for _, flat in parts], self.copy_streams.copy(copies, out=True)
        return storage.memory

    def _parts(self, weights: FlatBuffer) -> list[tuple[int, torch.Tensor]]:
        """The gradients of a bucket as dense pieces, and where each begins."""
        members = weights.members
        large = most_of([rounded(m.tensor.nbytes) for m in members])
        alone = _flat(members[large].tensor) if large is not None else None
        runs = [members] if large is None or alone is None else [members[:large], members[large + 1 :]]
        found = [(members[large].offset, alone)] if large is not None and alone is not None else []
        for run in filter(None, runs):
            start, end = run[0].offset, run[-1].offset + rounded(run[-1].tensor.nbytes)
            flat = torch.empty(end - start, dtype=torch.uint8, device=self.device)
            for member in run:
                if member.tensor.grad is not None:
                    replace(member, offset=member.offset - start).over(flat).copy_(member.tensor.grad)
            found.append((start, flat))
        return found

    def point_grads_at_storage(self, bucket: Bucket, storage: torch.Tensor) -> None:
        """Make every ``p.grad`` of a bucket a view of its storage; the parameters must be off the device too."""
        assert bucket.weights is not None
        for member in bucket.weights.members:
            if member.tensor.grad is not None:
                member.tensor.grad = None
                member.tensor.grad = member.over(storage)

    def store(self, bucket: Bucket, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients (by the id of their parameter) that existed before into storage; the parameters are off the
        device."""
        assert bucket.weights is not None
        if (storage := self.storages.get(bucket.number)) is None:
            return
        for member in bucket.weights.members:
            if (grad := gradients.get(id(member.tensor))) is not None:
                view = member.over(storage.memory)
                view.copy_(grad)
                member.tensor.grad = view

    def offloaded(self, bucket: Bucket) -> bool:
        """Whether some gradients of a bucket are off the device."""
        storage = self.storages.get(bucket.number)
        if storage is None:
            return False
        resident = storage.memory.untyped_storage().data_ptr()
        return any(_lies_in(p.grad, resident) for p in bucket.trained)

    def fetch(self, bucket: Bucket) -> None:
        """Copy the gradients of a bucket to the device, where its parameters must be."""
        assert bucket.weights is not None
        self.synchronize()
        storage = self.storages[bucket.number].memory
        flat = torch.empty(bucket.weights.bytes, dtype=torch.uint8, device=self.device)
        (event,) = self.copy_streams.copy([(flat, storage, (self.copy_streams.now(),))], out=False)
        event.wait()
        start = storage.untyped_storage().data_ptr()
        for member in bucket.weights.members:
            if _lies_in(member.tensor.grad, start):
                member.tensor.grad = None
                member.tensor.grad = member.over(flat)

    def synchronize(self) -> None:
        """Let the host wait until all gradients are copied out."""
        for event in self.copying_out[1] if self.copying_out is not None else ():
            event.finish()
        self.copying_out = None

    def close(self) -> None:
        """Give the storage back."""
        self.synchronize()
        for storage in self.storages.values():
            storage.close()
        self.storages = {}


def _lies_in(grad: torch.Tensor | None, address: int) -> bool:
    """Whether a gradient is a view of the memory that begins at an address; a sparse one is not."""
    if grad is None or grad.layout is not torch.strided:
        return False
    return grad.untyped_storage().data_ptr() == address


def _flat(p: torch.Tensor) -> torch.Tensor | None:
    """The memory of a parameter's gradient, if it is laid out as its storage is; then no gathering is needed."""
    grad = p.grad
    if grad is None or not movable(grad) or (grad.dtype, grad.stride()) != (p.dtype, p.stride()):
        return None
    return torch.empty(0, dtype=torch.uint8, device=grad.device).set_(grad.untyped_storage())
