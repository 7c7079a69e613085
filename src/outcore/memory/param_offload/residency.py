"""Parameters that come to the device when they are needed, and leave.

If the stage has room for all of them, they come once and stay until they were updated. If not (`stage_bytes`), they
pass through: a bucket leaves when others need the room and comes again for backward, which finds it by the handles that
autograd holds instead of the weights it saved. The order of use is known, so the next bucket is started beside the one
in use, and what will not be needed for longest leaves first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.graph.record.recording import Step, Tape
from outcore.memory.offload.copy_streams import copy_streams_for
from outcore.memory.param_offload.buckets import Bucket, BucketTensor, Use, make_buckets
from outcore.memory.param_offload.device_window import AllocatorWindow
from outcore.memory.param_offload.flat_buffer import FlatBuffer
from outcore.memory.replay.replay_buffer import SavedHandle
from outcore.planner.memory.buckets import that_follows, that_leave
from outcore.planner.memory.state_policy import StatePolicy

__all__ = ["ParamResidency", "ResidencyStats"]


@dataclass
class ResidencyStats:
    """How many bytes of parameters are on the device, where they pass through it."""

    here_bytes: int = 0
    peak_bytes: int = 0

    def change(self, size: int) -> None:
        """Some come or leave."""
        self.here_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)


class ParamResidency:
    """The parameters of a model on their way between the device and their home.

    Args:
        uses: the calls of the model that read parameters, in order (`outcore.memory.param_offload.buckets.uses_of`).
        policy: what lives where.
        device: where the model computes.
    """

    def __init__(self, uses: Sequence[Use], policy: StatePolicy, device: torch.device) -> None:
        self.policy, self.device, self.copy_streams = policy, device, copy_streams_for(device)
        self.windowed = policy.stage_bytes is not None
        self.buckets, self.home = make_buckets((p for _, _, ps in uses for p in ps), policy, device, self.copy_streams)
        self.sizes = [bucket.weights.bytes if bucket.weights is not None else 0 for bucket in self.buckets]
        self.of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self.calls: dict[str, list[Bucket]] = {}
        """Buckets that a call of the model reads."""
        for call, _, parameters in uses:
            self.calls.setdefault(call, []).extend(dict.fromkeys(self.of[id(p)] for p in parameters))
        self.at: dict[int, Bucket] = {}
        """Address of memory -> the bucket that is there, where parameters pass through."""
        self.held: Counter[Bucket] = Counter()
        """Buckets that a module needs until its forward is over."""
        self.replaying = False
        """Calls bring what they read one by one, so modules need hold nothing."""
        self.stats = ResidencyStats()
        self.asleep = False
        """The model is looked at, not run: hooks do nothing."""

    @property
    def flat_buffers(self) -> list[FlatBuffer]:
        """The parameters, as far as they are not on the device for good."""
        return [bucket.weights for bucket in self.buckets if bucket.weights is not None]

    # Coming

    def begin(self) -> None:
        """A forward pass begins: what has left comes back, in the order in which it is needed."""
        for flat_buffer in self.flat_buffers:
            flat_buffer.adopt()
        for flat_buffer in self.flat_buffers if not self.windowed else ():
            self._book(flat_buffer)

    def need(self, *buckets: Bucket, backward: bool = False) -> None:
        """The parameters of some buckets are about to be used, all at once."""
        for bucket in buckets:
            flat_buffer = bucket.weights
            if flat_buffer is None or (flat_buffer.here and not flat_buffer.arriving):
                continue
            if flat_buffer.place is None:
                self._make_room(flat_buffer.bytes, buckets, backward)
            self._book(flat_buffer)
            flat_buffer.arrive()
            if self.windowed:
                assert flat_buffer.place is not None
                self.at[flat_buffer.place.memory.untyped_storage().data_ptr()] = bucket
        if self.windowed and buckets:
            self._look_ahead(buckets, backward)

    def _book(self, flat_buffer: FlatBuffer) -> None:
        if flat_buffer.place is None:
            self.stats.change(flat_buffer.bytes)
        flat_buffer.book()

    def _look_ahead(self, buckets: Sequence[Bucket], backward: bool) -> None:
        """Start to bring the bucket that comes next, if there is room for it beside these."""
        assert self.policy.stage_bytes is not None
        number = that_follows(
            [bucket.number for bucket in buckets], self.sizes, self.policy.stage_bytes, backward=backward
        )
        if number is None or (flat_buffer := self.buckets[number].weights) is None or flat_buffer.place is not None:
            return
        self._make_room(flat_buffer.bytes, buckets, backward)
        self._book(flat_buffer)

    def _make_room(self, size: int, kept: Sequence[Bucket], backward: bool) -> None:
        """Send away what will not be needed for longest, until there is room for so many bytes more."""
        if self.policy.stage_bytes is None:
            return
        here = [
            bucket.number for bucket in self.buckets if bucket.weights is not None and bucket.weights.place is not None
        ]
        held = () if self.replaying else (bucket for bucket, times in self.held.items() if times > 0)
        needed = {bucket.number for bucket in (*kept, *held)}
        for number in that_leave(here, self.sizes, size, needed, self.policy.stage_bytes, backward=backward):
            flat_buffer = self.buckets[number].weights
            assert flat_buffer is not None
            self.release(flat_buffer)

    # Leaving

    def release(self, flat_buffer: FlatBuffer) -> None:
        """A flat buffer leaves; what it holds is at home, or on its way."""
        if flat_buffer.here and (flat_buffer.exposed or flat_buffer.touched or flat_buffer.adopt()):
            flat_buffer.send()
        self.depart(flat_buffer)

    def depart(self, flat_buffer: FlatBuffer) -> None:
        """A flat buffer leaves; its home holds all of it, or will."""
        if flat_buffer.place is None:
            return
        self.stats.change(-flat_buffer.bytes)
        if self.windowed:
            self.at.pop(flat_buffer.place.memory.untyped_storage().data_ptr(), None)
        elif flat_buffer.here:  # a graph that is still alive must notice
            torch.autograd.graph.increment_version([m.tensor for m in flat_buffer.members])
        flat_buffer.depart()

    def pause(self, but: Sequence[FlatBuffer] = ()) -> None:
        """A pass is over, and user code runs: what is here may be read and written, what is not is at home; but some
        that somebody else looks after."""
        for flat_buffer in self.flat_buffers:
            if flat_buffer in but:
                flat_buffer.exposed = True
            elif flat_buffer.here:
                flat_buffer.arrive()
                flat_buffer.exposed = True
            else:
                self.depart(flat_buffer)  # it was brought here for nothing
                flat_buffer.settle()

    def go_home(self) -> None:
        """Everything that is here leaves; the host waits until it has."""
        for flat_buffer in self.flat_buffers:
            self.release(flat_buffer)
        for flat_buffer in self.flat_buffers:
            flat_buffer.settle()
        for stage in {id(flat_buffer.stage): flat_buffer.stage for flat_buffer in self.flat_buffers}.values():
            if isinstance(stage, AllocatorWindow):
                stage.tidy()  # copied from by now, and not to be held until somebody else comes

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are on the device for a moment, because the model is recorded; hooks do nothing."""
        self.asleep = True
        away: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if not self.windowed:
                self.need(*self.buckets)
            away = [
                (m.tensor, m.tensor.data)
                for flat_buffer in self.flat_buffers
                if not flat_buffer.here
                for m in flat_buffer.members
            ]
            for tensor, _ in away if self.device.type != "cpu" else ():
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            self.asleep = False
            for tensor, home in away:
                tensor.data = home

    # What replays a recording asks these

    def perform(self, tape: Tape, step: Step) -> None:
        """Run a step of a recording."""
        if (buckets := self.calls.get(step.name)) is not None:
            self.replaying = True
            try:
                self.need(*buckets)
            finally:
                self.replaying = False
        Tape.step(tape, step)

    def summon(self, steps: Iterable[Step]) -> None:
        """Steps are about to run again in backward."""
        buckets = dict.fromkeys(bucket for step in steps for bucket in self.calls.get(step.name, ()))
        self.need(*buckets, backward=True)

    def hooked(self) -> contextlib.AbstractContextManager[Any]:
        """Hold what autograd saves, where parameters pass through; the model runs as it is."""
        if not self.windowed:
            return contextlib.nullcontext()

        def pack(tensor: torch.Tensor) -> Any:
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return tensor.detach()
            return self.claim(tensor) or SavedHandle(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return packed.unpack() if isinstance(packed, SavedHandle) else packed

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def claim(self, tensor: torch.Tensor) -> SavedHandle | None:
        """What autograd is to hold instead of a tensor that lies in the memory of a bucket."""
        bucket = self.at.get(tensor.untyped_storage().data_ptr()) if self.at else None
        return BucketTensor(tensor, bucket, self) if bucket is not None else None
