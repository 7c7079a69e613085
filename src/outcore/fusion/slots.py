"""Which member is in which slot of an array, and where its tensors are.

A slot holds one member: its model, optimizers, schedulers and status. Groups hold the tensors of consecutive slots,
stacked, and step them. Members come and go, are stopped and continue, and the groups can be arranged in another way at
any time; each member's training is as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from outcore.errors import FuseError
from outcore.fusion.group import Group, TrainingTerms
from outcore.fusion.member_factory import MemberFactory, MemberState
from outcore.fusion.program.call import MemberRandomness
from outcore.fusion.runner import GroupRunner, RunMode
from outcore.fusion.training import MemberTraining


class MemberSlots:
    """The members of an array, in slots and groups."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        kind: MemberFactory,
        terms: TrainingTerms,
        *,
        seeds: Sequence[int] | None,
        way: RunMode,
    ) -> None:
        self.kind, self.terms, self.way = kind, terms, way
        self._randomness = MemberRandomness(seeds)
        self.slots = [kind.slot(model, i) for i, model in enumerate(models)]
        self.groups: list[Group] = []
        self.arrange(way)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def device(self) -> torch.device:
        """The device of the members."""
        return self.groups[0].device

    @property
    def status(self) -> list[str]:
        """The status of each member: training, stopped, or diverged."""
        self._look()
        return [slot.status for slot in self.slots]

    @property
    def models(self) -> list[nn.Module]:
        """The members' models: the user's own, their tensors views of the stacks."""
        return [slot.model for slot in self.slots]

    def stop(self, slot: int) -> None:
        """Train a member no further; its weights stay as they are."""
        group, place = self._place(slot)
        if self.slots[slot].status == "training":
            self.slots[slot].frozen = {name: t[place].clone() for name, t in group.stack.buffers.items()}
        self._mark(slot, "stopped")

    def resume(self, slot: int) -> None:
        """Continue to train a stopped member."""
        self.restore_buffers(slot)
        self._mark(slot, "training")

    def restore_buffers(self, slot: int) -> None:
        """Set a stopped member's buffers back to what they were when it was stopped."""
        group, place = self._place(slot)
        for name, content in self.slots[slot].frozen.items():
            group.stack.buffers[name][place].copy_(content)

    def refill(self, slot: int, model: nn.Module, *, seed: int | None = None) -> None:
        """Give a slot to another model of the same architecture; it starts with a fresh optimizer and schedule."""
        group, place = self._place(slot)
        if self.way.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        group.stack.put(place, model)
        after = self.slots[slot] = self.kind.slot(model, slot)
        for name, stepper in group.steppers.items():
            stepper.replace(place, after.optimizers[name])
            group.trainings[name][place] = after.trainings[name]
        if seed is not None:
            self._randomness.reseed(slot, seed)
        self._mark(slot, "training")

    def keep(self, slots: Sequence[int]) -> None:
        """Continue with these members only, in this order; the others leave, their models with memory of their own."""
        if not slots or len(set(slots)) < len(slots):
            raise FuseError(f"an array keeps at least one member, and none twice; given were {list(slots)}")
        self.release()
        self.slots = [self.slots[slot] for slot in slots]
        self.terms, self._randomness = self.terms.only(slots), self._randomness.only(slots)
        self.arrange(replace(self.way, width=min(self.way.width, len(self))))

    def release(self) -> list[nn.Module]:
        """Give every model memory of its own again; the array must not be used afterwards."""
        self._look()
        for slot in range(len(self)):
            self.restore_buffers(slot)
        for group in self.groups:
            group.stack.release()
        self.groups = []
        return self.models

    def arrange(self, way: RunMode) -> None:
        """Run in another way from the next step on; the state of the members is kept."""
        self._look()
        for i in range(len(self) if self.groups else 0):
            self.restore_buffers(i)
        self.way, self.groups = way, []
        for slot in self.slots:
            form = torch.channels_last if way.channels_last else torch.contiguous_format
            for p in slot.model.parameters():
                if p.dim() == 4:
                    p.data = p.data.contiguous(memory_format=form)
        for first in range(0, len(self), way.width):
            slots = self.slots[first : first + way.width]
            optimizers = {name: [s.optimizers[name] for s in slots] for name in slots[0].optimizers}
            self.groups.append(Group(first, self._members(slots), optimizers, self._randomness, self.terms))
        for i, slot in enumerate(self.slots):
            if slot.status != "training":
                group, place = self._place(i)
                group.alive[place] = False
        self.runner = GroupRunner(self.groups, way)

    def _place(self, slot: int) -> tuple[Group, int]:
        if not 0 <= slot < len(self):
            raise FuseError(f"no slot {slot}; there are {len(self)}")
        return self.groups[slot // self.way.width], slot % self.way.width

    def _look(self) -> None:
        """Update the status of members that have diverged, which the groups know."""
        living = [alive for group in self.groups for alive in group.alive.tolist()]
        for slot, alive in zip(self.slots, living, strict=bool(self.groups)):
            if not alive and slot.status == "training":
                slot.status = "diverged"

    def _mark(self, slot: int, status: str) -> None:
        group, place = self._place(slot)
        group.alive[place] = status == "training"
        self.slots[slot].status = status
        if status == "training":
            self.slots[slot].frozen = {}

    def _members(self, slots: Sequence[MemberState] | None = None) -> dict[str, list[MemberTraining]]:
        some = self.slots if slots is None else slots
        return {name: [slot.trainings[name] for slot in some] for name in some[0].trainings}
