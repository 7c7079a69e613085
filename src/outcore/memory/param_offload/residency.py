"""Parameters that are fetched to the device when they are needed, and evicted.

If the device window has room for all of them, they are fetched once and stay until they were updated. If not
(`stage_bytes`), they pass through it: a bucket is evicted when others need the room and is fetched again for backward,
which finds it by the handles that autograd holds in place of the weights. The order of use is known, so the next bucket
is prefetched while one is in use, and the one that will not be needed for longest is evicted first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from outcore.graph.record.recording import Step, Tape
from outcore.memory.offload.copy_streams import copy_streams_for
from outcore.memory.param_offload.buckets import Bucket, BucketTensor, Use, make_buckets
from outcore.memory.param_offload.device_window import AllocatorWindow
from outcore.memory.param_offload.flat_buffer import FlatBuffer
from outcore.memory.replay.replay_buffer import SavedHandle, unpack
from outcore.planner.memory.buckets import that_follows, that_leave
from outcore.planner.memory.state_policy import StatePolicy

DEVICE_QUERIES = frozenset(
    [*(getattr(torch.Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda")), torch.Tensor.get_device]
)
"""What a forward asks a parameter to learn where the model computes."""


@dataclass
class ResidencyStats:
    """How many bytes of parameters are on the device, now and at most."""

    here_bytes: int = 0
    peak_bytes: int = 0

    def change(self, size: int) -> None:
        """Count bytes that were fetched (positive) or evicted (negative)."""
        self.here_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)


class ParamResidency:
    """Which parameters of a model are on the device, and the copies between there and off-device storage.

    Args:
        uses: the calls of the model that read parameters, in order (`outcore.memory.param_offload.buckets.uses_of`).
        policy: what is offloaded and what stays on the device.
        device: where the model computes.
    """

    def __init__(self, uses: Sequence[Use], policy: StatePolicy, device: torch.device) -> None:
        self.policy, self.device, self.copy_streams = policy, device, copy_streams_for(device)
        self.windowed = policy.stage_bytes is not None
        self.buckets, self.storage = make_buckets(
            (p for _, _, ps in uses for p in ps), policy, device, self.copy_streams
        )
        self.sizes = [bucket.weights.bytes if bucket.weights is not None else 0 for bucket in self.buckets]
        self.bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self.calls: dict[str, list[Bucket]] = {}
        """Call of the model -> the buckets it reads."""
        for call, _, parameters in uses:
            self.calls.setdefault(call, []).extend(dict.fromkeys(self.bucket_of[id(p)] for p in parameters))
        self.at: dict[int, Bucket] = {}
        """Address of memory -> the bucket that is there, where parameters pass through a window."""
        self.held: Counter[Bucket] = Counter()
        """Buckets that a module needs until its forward is over."""
        self.replaying = False
        """A replay fetches what each call reads, so modules need not hold any bucket."""
        self.stats = ResidencyStats()
        self.hooks_disabled = False
        """The model is being recorded, not run: hooks do nothing."""

    @property
    def flat_buffers(self) -> list[FlatBuffer]:
        """The flat buffers of the offloaded parameters."""
        return [bucket.weights for bucket in self.buckets if bucket.weights is not None]

    # Fetch

    def prefetch_all(self) -> None:
        """Start to fetch all parameters, in the order in which forward needs them, where all fit."""
        for flat_buffer in self.flat_buffers:
            flat_buffer.rebind()
        for flat_buffer in self.flat_buffers if not self.windowed else ():
            self._prefetch(flat_buffer)

    def fetch(self, *buckets: Bucket, backward: bool = False) -> None:
        """Make the parameters of some buckets resident, all at once, and prefetch the bucket that comes next."""
        for bucket in buckets:
            flat_buffer = bucket.weights
            if flat_buffer is None or (flat_buffer.resident and not flat_buffer.copies_in):
                continue
            if flat_buffer.place is None:
                self._make_room(flat_buffer.bytes, buckets, backward)
            self._prefetch(flat_buffer)
            flat_buffer.make_resident()
            if self.windowed:
                assert flat_buffer.place is not None
                self.at[flat_buffer.place.memory.untyped_storage().data_ptr()] = bucket
        if self.windowed and buckets:
            self._prefetch_next(buckets, backward)

    def _prefetch(self, flat_buffer: FlatBuffer) -> None:
        if flat_buffer.place is None:
            self.stats.change(flat_buffer.bytes)
        flat_buffer.prefetch()

    def _prefetch_next(self, buckets: Sequence[Bucket], backward: bool) -> None:
        """Prefetch the bucket that comes next, if there is room for it beside these."""
        assert self.policy.stage_bytes is not None
        number = that_follows(
            [bucket.number for bucket in buckets], self.sizes, self.policy.stage_bytes, backward=backward
        )
        if number is None or (flat_buffer := self.buckets[number].weights) is None or flat_buffer.place is not None:
            return
        self._make_room(flat_buffer.bytes, buckets, backward)
        self._prefetch(flat_buffer)

    def _make_room(self, size: int, kept: Sequence[Bucket], backward: bool) -> None:
        """Evict what will not be needed for longest, until there is room for so many bytes more."""
        if self.policy.stage_bytes is None:
            return
        resident = [
            bucket.number for bucket in self.buckets if bucket.weights is not None and bucket.weights.place is not None
        ]
        held = () if self.replaying else (bucket for bucket, times in self.held.items() if times > 0)
        needed = {bucket.number for bucket in (*kept, *held)}
        for number in that_leave(resident, self.sizes, size, needed, self.policy.stage_bytes, backward=backward):
            flat_buffer = self.buckets[number].weights
            assert flat_buffer is not None
            self.evict(flat_buffer)

    # Evict

    def evict(self, flat_buffer: FlatBuffer) -> None:
        """Evict a flat buffer, written back first if it was or may have been modified."""
        if flat_buffer.resident and (flat_buffer.exposed or flat_buffer.modified or flat_buffer.rebind()):
            flat_buffer.write_back()
        self.evict_clean(flat_buffer)

    def evict_clean(self, flat_buffer: FlatBuffer) -> None:
        """Evict a flat buffer whose off-device copy is complete, or will be when its copies are."""
        if flat_buffer.place is None:
            return
        self.stats.change(-flat_buffer.bytes)
        if self.windowed:
            self.at.pop(flat_buffer.place.memory.untyped_storage().data_ptr(), None)
        elif flat_buffer.resident:  # a graph that is still alive must notice
            torch.autograd.graph.increment_version([m.tensor for m in flat_buffer.members])
        flat_buffer.evict()

    def expose(self, other_than: Sequence[FlatBuffer] = ()) -> None:
        """Prepare for user code after a pass: what is resident may be read and written, the rest is complete off the
        device. The flat buffers in `other_than` are left to the caller."""
        for flat_buffer in self.flat_buffers:
            if flat_buffer in other_than:
                flat_buffer.exposed = True
            elif flat_buffer.resident:
                flat_buffer.make_resident()
                flat_buffer.exposed = True
            else:
                self.evict_clean(flat_buffer)  # it was prefetched in vain
                flat_buffer.synchronize()

    def offload_all(self) -> None:
        """Evict everything that is resident; the host waits until it is written back."""
        for flat_buffer in self.flat_buffers:
            self.evict(flat_buffer)
        for flat_buffer in self.flat_buffers:
            flat_buffer.synchronize()
        for window in {id(flat_buffer.window): flat_buffer.window for flat_buffer in self.flat_buffers}.values():
            if isinstance(window, AllocatorWindow):
                window.tidy()  # copied by now, and not to be held until the next one is taken

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters on the device for a moment, because the model is recorded; hooks do nothing."""
        self.hooks_disabled = True
        away: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if not self.windowed:
                self.fetch(*self.buckets)
            away = [
                (m.tensor, m.tensor.data)
                for flat_buffer in self.flat_buffers
                if not flat_buffer.resident
                for m in flat_buffer.members
            ]
            for tensor, _ in away if self.device.type != "cpu" else ():
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            self.hooks_disabled = False
            for tensor, storage in away:
                tensor.data = storage

    # For the replay of a recording

    def perform(self, tape: Tape, step: Step) -> None:
        """Run a step of a recording, with the parameters it reads on the device."""
        if (buckets := self.calls.get(step.name)) is not None:
            self.replaying = True
            try:
                self.fetch(*buckets)
            finally:
                self.replaying = False
        Tape.step(tape, step)

    def fetch_for_recompute(self, steps: Iterable[Step]) -> None:
        """Fetch the parameters of steps that are about to run again in backward."""
        buckets = dict.fromkeys(bucket for step in steps for bucket in self.calls.get(step.name, ()))
        self.fetch(*buckets, backward=True)

    # What a forward may ask

    @cached_property
    def _empty_on_device(self) -> torch.Tensor:
        return torch.empty(0, device=self.device)

    def asked_where(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of one of `DEVICE_QUERIES`, with a parameter that is off the device exchanged for a tensor
        that is on it: a forward that takes the device of its first parameter (for autocast, for positions) asks where
        it computes, not where the parameter is just now."""
        return (self._empty_on_device, *args[1:]) if args and id(args[0]) in self.bucket_of else args

    def answering(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which parameters say that they are on the device, wherever they are."""
        away = self.policy.parameters == "offload" and self.device.type != "cpu"
        if not away or all(flat_buffer.resident for flat_buffer in self.flat_buffers):
            return contextlib.nullcontext()
        return _Answers(self)

    def hooked(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which autograd saves handles of parameters that pass through a window; the model runs as it
        is."""
        if not self.windowed:
            return contextlib.nullcontext()

        def pack(tensor: torch.Tensor) -> Any:
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return tensor.detach()
            return self.claim(tensor) or SavedHandle(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def claim(self, tensor: torch.Tensor) -> SavedHandle | None:
        """The handle that autograd saves in place of a tensor in the memory of a bucket; None for any other tensor."""
        bucket = self.at.get(tensor.untyped_storage().data_ptr()) if self.at else None
        return BucketTensor(tensor, bucket, self) if bucket is not None else None


class _Answers(TorchFunctionMode):
    """Answers what is asked of parameters that are off the device."""

    def __init__(self, residency: ParamResidency) -> None:
        super().__init__()
        self.residency = residency

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function on tensors is called."""
        if func in DEVICE_QUERIES:
            args = self.residency.asked_where(args)
        return func(*args, **(kwargs or {}))
