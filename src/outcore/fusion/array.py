"""Many small trainings as one: the array of members.

    array = outcore.fuse([build(seed) for seed in range(16)], loss=F.cross_entropy,
                         optimizer=lambda params, i: Adam(params, lr=rates[i]))
    losses = array.step(x, y)         # one loss per member
    array[3].state_dict()             # exactly a serial model's

Every member has its own weights, buffers, optimizer, schedule, clip, loss weight and random numbers; the batch is
shared, or there is one for each. A member whose loss is no longer finite is frozen as it is and reported; the others
go on. A slot can be stopped and given to another model while the rest trains on.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import FuseError, VaryingError
from outcore.fusion.group import GroupOutcome, TrainingTerms
from outcore.fusion.member import Member
from outcore.fusion.member_factory import MemberFactory
from outcore.fusion.program.autotune import AutotuneResult, choose
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.program.recordings import ProgramCache, same_settings
from outcore.fusion.program.values import Stacked
from outcore.fusion.runner import RunMode, cut
from outcore.fusion.slots import MemberSlots
from outcore.fusion.training import eval_mode
from outcore.fusion.verify import disagreement
from outcore.graph.record.captured_module import ChangeCounter
from outcore.graph.structure import leaves, substitute


class FusedArray(MemberSlots):
    """Members of one architecture that train together; made by `outcore.fuse`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        kind: MemberFactory,
        terms: TrainingTerms,
        *,
        seeds: Sequence[int] | None = None,
        way: RunMode | None = None,
        check: bool = True,
        unfused: Sequence[str] = (),
    ) -> None:
        super().__init__(models, kind, terms, seeds=seeds, way=way or RunMode(len(models)))
        self._way_given, self._check, self.unfused = way is not None, check, tuple(unfused)
        self.choice: AutotuneResult | None = None
        """The measurements that decided how to run; None if there were none."""
        self._recordings = ProgramCache()
        self._changes = ChangeCounter()
        self.steps = self._counted = 0
        self._begun = 0.0
        self.losses: Tensor | None = None
        """The losses of the last step, one per member."""
        self.metrics: dict[str, Tensor] = {}
        self.output: Any = None
        """What the models returned in the last step, if asked for, members first; on a GPU valid until the next."""
        self.notes: list[str] = []
        """What a reader should know about how it runs."""

    def __getitem__(self, slot: int) -> Member:
        """One member: its model, optimizer, state_dict, status."""
        if not -len(self) <= slot < len(self):
            raise IndexError(f"no member {slot}; there are {len(self)}")
        return Member(self, slot % len(self))

    def __iter__(self) -> Iterator[Member]:
        return (self[i] for i in range(len(self)))

    def step(self, *batch: Any, each: Sequence[tuple[Any, ...]] | None = None, objective: str | None = None) -> Any:
        """Train every member on a batch; returns the losses, one per member.

        Args:
            batch: inputs and targets, the same for all members. Inputs are a tensor, a tuple of positional or a dict
                of keyword arguments. Of an array with objectives: what their losses take.
            each: instead, one such batch per member, of equal shapes.
            objective: train only this one; all in turn by default, with a dict of losses as result.
        """
        names = [objective] if objective else list(self.slots[0].trainings)
        if not self._way_given and self.device.type == "cuda":
            self.tune(*batch, each=each)
        args = self.arguments(batch, each)
        found = {name: self._step(name, args) for name in names}
        self.steps += 1
        return found[names[0]] if len(names) == 1 else found

    def tune(
        self,
        *batch: Any,
        each: Sequence[tuple[Any, ...]] | None = None,
        memory_bytes: int | None = None,
        seconds: float = 0.2,
    ) -> AutotuneResult:
        """Measure how to run fastest and do so; on a GPU this happens before the first step if no way was given."""
        self._way_given = True
        self.choice = choose(self, *batch, each=each, memory_bytes=memory_bytes, seconds=seconds)
        self._begun, self._counted = time.perf_counter(), self.steps
        return self.choice

    def report(self) -> str:
        """What was predicted before training, and what was achieved since, including all that happened between
        steps."""
        if self.choice is None:
            return f"{len(self)} members, {self.way}; nothing was measured: array.tune(x, y)"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        count = self.steps - self._counted
        head = f"{len(self)} members, {self.way}: {self.choice.speedup:.2f}x predicted over one after the other"
        if not count:
            return head
        took = (time.perf_counter() - self._begun) / count
        return (
            f"{head}, {len(self) * self.choice.serial_s / took:.2f}x achieved in {count} steps of {took * 1e3:,.2f} ms"
        )

    def evaluate(
        self, *batch: Any, each: Sequence[tuple[Any, ...]] | None = None, objective: str | None = None
    ) -> Tensor:
        """Losses on a batch without training, in eval mode; `metrics` and `output` are set as by `step`."""
        name = objective or next(iter(self.slots[0].trainings))
        with torch.no_grad(), eval_mode([slot.trainings[name] for slot in self.slots]):
            args = self.arguments(batch, each)
            key, program = self.program(name, args)
            return self._collect(self.runner.forward(key, name, program, args, self._runs_own_models(program)))

    def schedule(self, metrics: Sequence[float] | Tensor | None = None) -> None:
        """Advance every living member's schedulers; a plateau scheduler gets its member's metric, or its loss."""
        values = metrics if metrics is not None else self.losses
        for i, slot in enumerate(self.slots):
            for scheduler in slot.schedulers if slot.status == "training" else ():
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    if values is None:
                        raise FuseError("a plateau scheduler needs a metric: array.schedule(metrics)")
                    scheduler.step(float(values[i]))
                else:
                    scheduler.step()

    def refill(self, slot: int, model: nn.Module, *, seed: int | None = None) -> None:
        """Give a slot to another model of the same architecture; it starts with a fresh optimizer and schedule."""
        released = self.slots[slot].model if 0 <= slot < len(self) else model
        super().refill(slot, model, seed=seed)
        if not same_settings(released, model):
            self._recordings = ProgramCache()
        if not self._recordings.programs or len(self._place(slot)[0]) == 1:
            self.runner.forget()  # in a group of one, the captured step is that of the other model's own modules
        self.runner.rename(self._recordings.rebind(self._members()))

    def keep(self, slots: Sequence[int]) -> None:
        """Continue with these members only, in this order; the others leave, their models with memory of their own."""
        super().keep(slots)
        if any(program.others for program in self._recordings.programs.values()):
            self._recordings = ProgramCache()  # differences between members are stored by slot
        self._recordings = self._recordings.copied(self._members())

    @property
    def coverage(self) -> dict[str, str]:
        """How each call of the last step was run: fused, vmap, members, shared; members for all in groups of one."""
        program = self._recordings.last
        if program is None:
            return {}
        return dict.fromkeys(program.graph.calls, "members") if self._runs_own_models(program) else dict(program.ways)

    # Inside

    def arguments(self, batch: tuple[Any, ...], each: Sequence[tuple[Any, ...]] | None) -> tuple[Any, ...]:
        """A batch as `MemberTraining` takes it, on the members' device."""
        return arguments(
            batch,
            each,
            members=len(self),
            whole=bool(self.kind.objectives),
            device=self.device,
            channels_last=self.way.channels_last,
        )

    def program(self, objective: str, args: tuple[Any, ...]) -> tuple[Hashable, StackedProgram]:
        """The recording that fits a batch, made and checked when it first appears, and its key."""
        members = [slot.trainings[objective] for slot in self.slots]
        shown = substitute(args, Stacked, lambda s: s.tensor[0])
        key = ProgramCache.key(objective, self.terms.autocast, members[0], shown)
        if (found := self._recordings.programs.get(key)) is not None:
            if self._runs_own_models(found) and (found.varying or not self.way.graphed):
                return key, found  # the models run their own code
            if sum(group.stack.adopt() for group in self.groups):
                self.runner.forget()
            if not found.outdated():
                self._changes.clear(key)
                return key, found
            try:
                self._changes.count(key, found)
            except VaryingError as error:
                found.varying, found.obstacle = True, f"{error.what} changes in every call"
                warnings.warn(f"outcore: {found.obstacle}, so members run by themselves", stacklevel=4)
                self._run_member_by_member(found.obstacle)
                return key, found
            self.runner.forget()
        with self.groups[0].autocast(), _leaving_nothing():
            made = self._recordings.programs[key] = StackedProgram.record(members, shown, self.unfused)
        if made.obstacle is not None:
            self._run_member_by_member(made.obstacle)
        elif self._check and torch.is_grad_enabled() and len(self.groups[-1]) > 1:
            self._verify(objective, made, args)
        return key, made

    def share_recordings(self, other: FusedArray) -> None:
        """Use the recordings of an array whose first members these are copies of."""
        self._recordings = other._recordings.copied(self._members())

    def _verify(self, objective: str, program: StackedProgram, args: tuple[Any, ...]) -> None:
        """Compare the fused gradients of one member with its model's own; where they differ, warn and run member by
        member."""
        group = self.groups[-1]
        with program.without_dropout() as certain, self.runner.beside(group):
            wrong = disagreement(group, objective, program, cut(group, args)) if certain else None
        if wrong is not None:
            warnings.warn(f"fused gradients of {wrong} are not the model's own; members run alone", stacklevel=5)
            program.obstacle = f"the fused gradient of {wrong} was not the model's own"
            self._run_member_by_member(program.obstacle)

    def _run_member_by_member(self, why: str) -> None:
        note = f"members run by themselves: {why}"
        if note not in self.notes:
            self.notes.append(note)
        if self.way.width > 1:
            graphed = self.device.type == "cuda"
            self.arrange(RunMode(1, graphed, graphed, channels_last=self.way.channels_last))

    def _runs_own_models(self, program: StackedProgram) -> bool:
        return program.obstacle is not None or self.way.width == 1

    def _step(self, objective: str, args: tuple[Any, ...]) -> Tensor:
        key, program = self.program(objective, args)
        return self._collect(self.runner.step(key, objective, program, args, self._runs_own_models(program)))

    def _collect(self, outcomes: Sequence[GroupOutcome]) -> Tensor:
        all_of = GroupOutcome.joined(outcomes, outputs=self.device.type == "cpu")
        self.losses, self.metrics, self.output = all_of.losses, all_of.metrics, all_of.output
        return self.losses


@contextlib.contextmanager
def _leaving_nothing() -> Iterator[None]:
    """Collect the garbage that was made inside, and only that: a full collection of a large process takes a tenth of a
    second.

    Nodes of a recording would tie parameters to the stream that it was made on.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # nothing grew older meanwhile
        if enabled:
            gc.enable()


def arguments(
    batch: tuple[Any, ...],
    each: Sequence[tuple[Any, ...]] | None,
    *,
    members: int,
    whole: bool,
    device: torch.device,
    channels_last: bool,
) -> tuple[Any, ...]:
    """The arguments of `Training` with tensors on the device; `whole` batches go to the loss as they are."""
    if (each is None) == (not batch):
        raise FuseError("give one batch for all, array.step(x, y), or one for each: array.step(each=[(x0, y0), …])")

    def placed(tensor: Tensor) -> Tensor:
        image = channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        moved = tensor.to(device, non_blocking=True)
        return moved.contiguous(memory_format=torch.channels_last) if image else moved

    if each is None:
        shared: tuple[Any, ...] = substitute(_as_called(batch, whole), Tensor, placed)
        return shared
    if len(each) != members:
        raise FuseError(f"each has {len(each)} batches, there are {members} members")
    called = [substitute(_as_called(tuple(b), whole), Tensor, placed) for b in each]
    columns = [[t for _, t in leaves(c, Tensor)] for c in called]
    if len({tuple(t.shape for t in column) for column in columns}) > 1:
        raise FuseError("the members' batches differ in shape; members of one array need equal batch shapes")
    joined = iter([Stacked(torch.stack(row)) for row in zip(*columns, strict=True)])
    filled: tuple[Any, ...] = substitute(called[0], Tensor, lambda _: next(joined))
    return filled


def _as_called(batch: tuple[Any, ...], whole: bool) -> tuple[Any, ...]:
    if whole:
        return (tuple(batch),)
    inputs, *targets = batch
    if len(targets) > 1:
        raise FuseError(f"a batch is inputs and targets, not {len(batch)} things; put several inputs in a tuple")
    return (inputs if isinstance(inputs, tuple | dict) else (inputs,), *targets)
