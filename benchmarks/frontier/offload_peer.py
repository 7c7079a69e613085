"""Activations that leave for the host beside the computation, as a strong peer of planned offload.

torch's `save_on_cpu` copies on the computing stream, pins memory anew in every step and copies a tensor once for each
operation that saves it. This one does none of that: copies run on streams of their own in both directions, pinned
memory is kept from step to step, a storage that several operations save leaves once, and backward fetches the next
tensors while it works on one. What is saved last is needed first, so the end of the forward stays on the device; how
much leaves is a share of the bytes, as a user would tune it. It knows no costs and no budget: that is what planning
adds. On a CPU, for trials, copies are made at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["OverlappingOffload"]


class _Slot:
    """One storage that has left, or stays."""

    def __init__(self, index: int, size_bytes: int) -> None:
        self.index, self.bytes = index, size_bytes
        self.host: torch.Tensor | None = None
        self.device: torch.Tensor | None = None
        self.left: Any = None
        """Passed when the copy to the host is there."""
        self.back: Any = None
        """Passed when the copy to the device is there."""


class OverlappingOffload:
    """A context for a forward; what it saves comes back in the backward that follows."""

    def __init__(self, model: torch.nn.Module, share: float = 1.0, ahead: int = 2, in_flight: int = 4) -> None:
        self.share, self.ahead, self.in_flight = share, ahead, in_flight
        kept = [*model.parameters(), *model.buffers()]
        self.device = kept[0].device.type
        self.least_bytes = 2**20 if self.device == "cuda" else 2**10
        self.parameters = {t.untyped_storage().data_ptr() for t in kept}
        self.total_bytes = 0
        """Of all storages that a step saves, known after the first."""
        self.pinned: dict[int, torch.Tensor] = {}
        """By the order in which storages are saved, which is the same in every step."""
        self.streams = [torch.cuda.Stream() for _ in range(2)] if self.device == "cuda" else [None, None]
        self.slots: list[_Slot] = []
        self.seen: dict[int, tuple[_Slot, StorageWeakRef]] = {}
        self.flying: deque[tuple[Any, torch.Tensor]] = deque()

    def __enter__(self) -> OverlappingOffload:
        self.slots, self.saved_bytes = [], 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        self.total_bytes = self.saved_bytes
        self.seen.clear()
        self.land(0)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Send away what is large, once for all that save it."""
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() < self.least_bytes
            or tensor.device.type != self.device
            or storage.data_ptr() in self.parameters
        ):
            return tensor
        # A weak reference keeps the address of a storage from being used for another.
        slot, _ = self.seen.get(storage._cdata, (None, None))
        if slot is None:
            slot = _Slot(len(self.slots), storage.nbytes())
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            if self.total_bytes and self.saved_bytes >= self.share * self.total_bytes:
                slot.device = whole
            else:
                self.send(slot, whole)
            self.slots.append(slot)
            self.saved_bytes += slot.bytes
            self.seen[storage._cdata] = slot, StorageWeakRef(storage)
        return slot, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again; the next ones are on their way."""
        if isinstance(packed, torch.Tensor):
            return packed
        slot, dtype, size, stride, offset = packed
        for other in reversed(self.slots[max(0, slot.index - self.ahead) : slot.index + 1]):
            self.fetch(other)
        self.wait(slot)
        for done in self.slots[slot.index + self.ahead + 1 :]:
            if done.host is not None and done.device is not None:
                self.wait(done)
                done.device = done.back = None  # whoever still needs it holds it
        whole = slot.device.untyped_storage()
        return torch.empty(0, dtype=dtype, device=slot.device.device).set_(whole, offset, size, stride)

    def send(self, slot: _Slot, whole: torch.Tensor) -> None:
        """Copy to the host; the device's memory is held until that is done."""
        host = self.pinned.get(slot.index)
        if host is None or host.nbytes < slot.bytes:
            host = torch.empty(slot.bytes, dtype=torch.uint8, pin_memory=self.device == "cuda")
            self.pinned[slot.index] = host
        slot.host = host[: slot.bytes]
        slot.left = self._copied(slot.host, whole, 0)
        self.flying.append((slot.left, whole))
        self.land(self.in_flight)

    def land(self, most: int) -> None:
        """Let go of what has arrived; no more than so many copies are under way."""
        while self.flying and (len(self.flying) > most or self.flying[0][0] is None or self.flying[0][0].query()):
            event, _ = self.flying.popleft()
            if event is not None:
                event.synchronize()

    def fetch(self, slot: _Slot) -> None:
        """Begin to copy back."""
        if slot.device is None and slot.host is not None:
            slot.device = torch.empty(slot.bytes, dtype=torch.uint8, device=self.device)
            slot.back = self._copied(slot.device, slot.host, 1, slot.left)

    def wait(self, slot: _Slot) -> None:
        """What follows on the computing stream finds the tensor."""
        if slot.back is not None:
            torch.cuda.current_stream().wait_event(slot.back)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, direction: int, after: Any = None) -> Any:
        stream = self.streams[direction]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            if after is not None:
                stream.wait_event(after)
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            target.copy_(source, non_blocking=True)
            if stream is None:
                return None
            event = torch.cuda.Event()
            event.record()
            return event
