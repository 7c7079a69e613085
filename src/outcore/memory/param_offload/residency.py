"""Parameters that come to the device when they are needed, and leave.

If the stage has room for all of them, they come once and stay until they were updated. If not (`stage_bytes`), they
pass through: a lot leaves when others need the room and comes again for backward, which finds it by the handles that
autograd holds instead of the weights it saved. The order of use is known, so the next lot is started beside the one in
use, and what will not be needed for longest leaves first.
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
from outcore.memory.offload.copy_streams import lanes_for
from outcore.memory.param_offload.buckets import Bucket, BucketTensor, Use, make_lots
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
        self.policy, self.device, self.lanes = policy, device, lanes_for(device)
        self.windowed = policy.stage_bytes is not None
        self.lots, self.home = make_lots((p for _, _, ps in uses for p in ps), policy, device, self.lanes)
        self.sizes = [lot.weights.bytes if lot.weights is not None else 0 for lot in self.lots]
        self.of = {id(p): lot for lot in self.lots for p in lot.parameters}
        self.calls: dict[str, list[Bucket]] = {}
        """Lots that a call of the model reads."""
        for call, _, parameters in uses:
            self.calls.setdefault(call, []).extend(dict.fromkeys(self.of[id(p)] for p in parameters))
        self.at: dict[int, Bucket] = {}
        """Address of memory -> the lot that is there, where parameters pass through."""
        self.held: Counter[Bucket] = Counter()
        """Lots that a module needs until its forward is over."""
        self.replaying = False
        """Calls bring what they read one by one, so modules need hold nothing."""
        self.stats = ResidencyStats()
        self.asleep = False
        """The model is looked at, not run: hooks do nothing."""

    @property
    def parcels(self) -> list[FlatBuffer]:
        """The parameters, as far as they are not on the device for good."""
        return [lot.weights for lot in self.lots if lot.weights is not None]

    # Coming

    def begin(self) -> None:
        """A forward pass begins: what has left comes back, in the order in which it is needed."""
        for parcel in self.parcels:
            parcel.adopt()
        for parcel in self.parcels if not self.windowed else ():
            self._book(parcel)

    def need(self, *lots: Bucket, backward: bool = False) -> None:
        """The parameters of some lots are about to be used, all at once."""
        for lot in lots:
            parcel = lot.weights
            if parcel is None or (parcel.here and not parcel.arriving):
                continue
            if parcel.place is None:
                self._make_room(parcel.bytes, lots, backward)
            self._book(parcel)
            parcel.arrive()
            if self.windowed:
                assert parcel.place is not None
                self.at[parcel.place.memory.untyped_storage().data_ptr()] = lot
        if self.windowed and lots:
            self._look_ahead(lots, backward)

    def _book(self, parcel: FlatBuffer) -> None:
        if parcel.place is None:
            self.stats.change(parcel.bytes)
        parcel.book()

    def _look_ahead(self, lots: Sequence[Bucket], backward: bool) -> None:
        """Start to bring the lot that comes next, if there is room for it beside these."""
        assert self.policy.stage_bytes is not None
        number = that_follows([lot.number for lot in lots], self.sizes, self.policy.stage_bytes, backward=backward)
        if number is None or (parcel := self.lots[number].weights) is None or parcel.place is not None:
            return
        self._make_room(parcel.bytes, lots, backward)
        self._book(parcel)

    def _make_room(self, size: int, kept: Sequence[Bucket], backward: bool) -> None:
        """Send away what will not be needed for longest, until there is room for so many bytes more."""
        if self.policy.stage_bytes is None:
            return
        here = [lot.number for lot in self.lots if lot.weights is not None and lot.weights.place is not None]
        held = () if self.replaying else (lot for lot, times in self.held.items() if times > 0)
        needed = {lot.number for lot in (*kept, *held)}
        for number in that_leave(here, self.sizes, size, needed, self.policy.stage_bytes, backward=backward):
            parcel = self.lots[number].weights
            assert parcel is not None
            self.release(parcel)

    # Leaving

    def release(self, parcel: FlatBuffer) -> None:
        """A parcel leaves; what it holds is at home, or on its way."""
        if parcel.here and (parcel.exposed or parcel.touched or parcel.adopt()):
            parcel.send()
        self.depart(parcel)

    def depart(self, parcel: FlatBuffer) -> None:
        """A parcel leaves; its home holds all of it, or will."""
        if parcel.place is None:
            return
        self.stats.change(-parcel.bytes)
        if self.windowed:
            self.at.pop(parcel.place.memory.untyped_storage().data_ptr(), None)
        elif parcel.here:  # a graph that is still alive must notice
            torch.autograd.graph.increment_version([m.tensor for m in parcel.members])
        parcel.depart()

    def pause(self, but: Sequence[FlatBuffer] = ()) -> None:
        """A pass is over, and user code runs: what is here may be read and written, what is not is at home; but some
        that somebody else looks after."""
        for parcel in self.parcels:
            if parcel in but:
                parcel.exposed = True
            elif parcel.here:
                parcel.arrive()
                parcel.exposed = True
            else:
                self.depart(parcel)  # it was brought here for nothing
                parcel.settle()

    def go_home(self) -> None:
        """Everything that is here leaves; the host waits until it has."""
        for parcel in self.parcels:
            self.release(parcel)
        for parcel in self.parcels:
            parcel.settle()
        for stage in {id(parcel.stage): parcel.stage for parcel in self.parcels}.values():
            if isinstance(stage, AllocatorWindow):
                stage.tidy()  # copied from by now, and not to be held until somebody else comes

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are on the device for a moment, because the model is recorded; hooks do nothing."""
        self.asleep = True
        away: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if not self.windowed:
                self.need(*self.lots)
            away = [(m.tensor, m.tensor.data) for parcel in self.parcels if not parcel.here for m in parcel.members]
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
        if (lots := self.calls.get(step.name)) is not None:
            self.replaying = True
            try:
                self.need(*lots)
            finally:
                self.replaying = False
        Tape.step(tape, step)

    def summon(self, steps: Iterable[Step]) -> None:
        """Steps are about to run again in backward."""
        lots = dict.fromkeys(lot for step in steps for lot in self.calls.get(step.name, ()))
        self.need(*lots, backward=True)

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
        """What autograd is to hold instead of a tensor that lies in the memory of a lot."""
        lot = self.at.get(tensor.untyped_storage().data_ptr()) if self.at else None
        return BucketTensor(tensor, lot, self) if lot is not None else None
