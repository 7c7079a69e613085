"""Many small trainings as one: the array of members.

    array = outcore.fuse([build(seed) for seed in range(16)], loss=F.cross_entropy,
                         optimizer=lambda params, i: Adam(params, lr=rates[i]))
    losses = array.step(x, y)         # one loss per member
    array[3].state_dict()             # exactly a serial model's

Every member has its own weights, buffers, optimizer, schedule, clip, loss weight and random numbers; the batch is
shared, or there is one for each. A member whose loss is no longer finite is frozen as it is and reported; the others
do not notice. A slot can be stopped and given to another model while the rest trains on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outcore.errors import FuseError
from outcore.fusion.call import Randomness
from outcore.fusion.clipping import clip_by_norm
from outcore.fusion.lane import Lane, Outcome
from outcore.fusion.member import Member
from outcore.fusion.program import Program
from outcore.fusion.scaling import LossScale
from outcore.fusion.training import Training
from outcore.fusion.values import Stacked
from outcore.graph.keys import key_of
from outcore.graph.structure import leaves, substitute

__all__ = ["FusedArray", "Objective"]

Optimizers = Callable[..., torch.optim.Optimizer]
DEFAULT = "loss"


@dataclass(frozen=True, slots=True)
class Objective:
    """One of several losses of a model, each with an optimizer of its own (a GAN has two).

    `loss` takes the model and the batch, `optimizer` the model and the member's index.
    """

    loss: Callable[..., Tensor]
    optimizer: Callable[[nn.Module, int], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How members are trained; the same for all slots."""

    loss: Callable[..., Tensor] | None
    metrics: Mapping[str, Callable[..., Tensor]]
    objectives: Mapping[str, Objective]

    def trainings(self, model: nn.Module) -> dict[str, Training]:
        if self.objectives:
            return {name: Training(model, None, o.loss) for name, o in self.objectives.items()}
        return {DEFAULT: Training(model, self.loss, None, self.metrics)}


@dataclass
class _Slot:
    """What belongs to one member, besides its tensors."""

    trainings: dict[str, Training]
    optimizers: dict[str, torch.optim.Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    status: str = "training"


class FusedArray:
    """Members of one architecture that train together; made by `outcore.fuse`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        kind: _Kind,
        optimizers: Callable[[nn.Module, int], dict[str, torch.optim.Optimizer]],
        *,
        scheduler: Callable[..., Any] | None,
        clip: Tensor | None,
        loss_weight: Tensor | None,
        loss_scale: LossScale | None,
        seeds: Sequence[int] | None,
        width: int | None,
        check: bool,
    ) -> None:
        self._kind, self._make_optimizers, self._make_scheduler = kind, optimizers, scheduler
        self._clip, self._weights, self._scale, self._check = clip, loss_weight, loss_scale, check
        self._randomness = Randomness(seeds)
        self._programs: dict[Hashable, Program] = {}
        self.width = width or len(models)
        """Members per lane."""
        self.steps = 0
        self.losses: Tensor | None = None
        """Of the last step, one per member."""
        self.metrics: dict[str, Tensor] = {}
        self.output: Any = None
        """What the models returned in the last step, members first."""
        self.notes: list[str] = []
        """What a reader should know about how it runs."""
        self.slots: list[_Slot] = []
        self.lanes: list[Lane] = []
        for i, model in enumerate(models):
            self.slots.append(self._slot(model, i))
        self._line_up(self.width)

    # The public face

    def __len__(self) -> int:
        return len(self.slots)

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
            batch: inputs and targets, the same for all members. Inputs are a tensor, a tuple of positional or a dict of
                keyword arguments. Of an array with objectives: what their losses take.
            each: instead, one such batch per member, of equal shapes.
            objective: train only this one; all in turn by default, with a dict of losses as result.
        """
        names = [objective] if objective else list(self.slots[0].trainings)
        found = {name: self._step(name, self._arguments(batch, each)) for name in names}
        self.steps += 1
        return found[names[0]] if len(names) == 1 else found

    def evaluate(
        self, *batch: Any, each: Sequence[tuple[Any, ...]] | None = None, objective: str | None = None
    ) -> Tensor:
        """Losses on a batch without training, in eval mode; `metrics` and `output` are set as by `step`."""
        name = objective or next(iter(self.slots[0].trainings))
        modes = [(m, m.training) for slot in self.slots for m in slot.trainings[name].modules()]
        try:
            for slot in self.slots:
                slot.trainings[name].eval()
            with torch.no_grad():
                args = self._arguments(batch, each)
                program = self._program(name, args)
                return self._collect(
                    [
                        lane.forward(name, program, self._cut(lane, args), alone=self._alone(lane, program))
                        for lane in self.lanes
                    ]
                )
        finally:
            for module, mode in modes:
                module.training = mode

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

    def stop(self, slot: int) -> None:
        """Train a member no further; its weights stay as they are."""
        self._mark(slot, "stopped")

    def resume(self, slot: int) -> None:
        """Train a stopped member on."""
        self._mark(slot, "training")

    def refill(self, slot: int, model: nn.Module, *, seed: int | None = None) -> None:
        """Give a slot to another model of the same architecture; it starts with a fresh optimizer and schedule."""
        lane, place = self._place(slot)
        before = self.slots[slot]
        released = next(iter(before.trainings.values())).model
        lane.stack.put(place, model)
        after = self.slots[slot] = self._slot(model, slot)
        for name, stepper in lane.steppers.items():
            stepper.replace(place, after.optimizers[name])
            lane.trainings[name][place] = after.trainings[name]
        if seed is not None and self._randomness.states is not None:
            self._randomness.states[slot] = torch.Generator().manual_seed(seed).get_state()
        if slot == 0 or not _same_settings(released, model):
            self._programs.clear()
        self._mark(slot, "training")

    @property
    def status(self) -> list[str]:
        """Of each member: training, stopped, or diverged."""
        self._look()
        return [slot.status for slot in self.slots]

    @property
    def models(self) -> list[nn.Module]:
        """The members' models: the user's own, their tensors views of the stacks."""
        return [next(iter(slot.trainings.values())).model for slot in self.slots]

    @property
    def coverage(self) -> dict[str, str]:
        """How each call of the last step was run: fused, vmap, members, shared; one by one for all in a lane of one."""
        program = next(reversed(self._programs.values()), None)
        if program is None:
            return {}
        if program.obstacle is not None or self.width == 1:
            return dict.fromkeys(program.graph.calls, "members")
        return dict(program.ways)

    def release(self) -> list[nn.Module]:
        """Give every model memory of its own again; the array must not be used afterwards."""
        for lane in self.lanes:
            lane.stack.release()
        models, self.lanes = self.models, []
        return models

    # Inside

    def _slot(self, model: nn.Module, index: int) -> _Slot:
        slot = _Slot(self._kind.trainings(model), self._make_optimizers(model, index))
        if self._make_scheduler is not None:
            made = [self._make_scheduler(o, index) for o in slot.optimizers.values()]
            slot.schedulers = [s for m in made for s in (m if isinstance(m, list | tuple) else [m])]
        return slot

    def _line_up(self, width: int) -> None:
        """Put the members into lanes of a width; what they have learned goes with them."""
        frozen = [slot.status != "training" for slot in self.slots]
        self.width, self.lanes = width, []
        for first in range(0, len(self), width):
            slots = self.slots[first : first + width]
            lane = Lane(
                first,
                {name: [s.trainings[name] for s in slots] for name in slots[0].trainings},
                {name: [s.optimizers[name] for s in slots] for name in slots[0].optimizers},
                self._randomness,
            )
            if self._weights is not None:
                lane.weights = self._weights[first : first + width].to(lane.alive.device)
            self.lanes.append(lane)
        for i, stopped in enumerate(frozen):
            if stopped:
                lane, place = self._place(i)
                lane.alive[place] = False

    def _place(self, slot: int) -> tuple[Lane, int]:
        if not 0 <= slot < len(self):
            raise FuseError(f"no slot {slot}; there are {len(self)}")
        return self.lanes[slot // self.width], slot % self.width

    def _mark(self, slot: int, status: str) -> None:
        lane, place = self._place(slot)
        lane.alive[place] = status == "training"
        self.slots[slot].status = status

    def _look(self) -> None:
        """Learn which members have diverged."""
        living = [alive for lane in self.lanes for alive in lane.alive.tolist()]
        for slot, alive in zip(self.slots, living, strict=True):
            if not alive and slot.status == "training":
                slot.status = "diverged"

    def _arguments(self, batch: tuple[Any, ...], each: Sequence[tuple[Any, ...]] | None) -> tuple[Any, ...]:
        if (each is None) == (not batch):
            raise FuseError("give one batch for all, array.step(x, y), or one for each: array.step(each=[(x0, y0), …])")
        if each is None:
            return self._as_called(batch)
        if len(each) != len(self):
            raise FuseError(f"each has {len(each)} batches, there are {len(self)} members")
        called = [self._as_called(tuple(b)) for b in each]
        columns = [[t for _, t in leaves(c, Tensor)] for c in called]
        if len({len(c) for c in columns}) > 1 or any(
            len({t.shape for t in row}) > 1 for row in zip(*columns, strict=True)
        ):
            raise FuseError("the members' batches differ in shape; members of one array need equal batch shapes")
        joined = iter([Stacked(torch.stack(row)) for row in zip(*columns, strict=True)])
        filled: tuple[Any, ...] = substitute(called[0], Tensor, lambda _: next(joined))
        return filled

    def _as_called(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch as the arguments of `Training`."""
        if self._kind.objectives:
            return (tuple(batch),)
        inputs, *targets = batch
        if len(targets) > 1:
            raise FuseError(f"a batch is inputs and targets, not {len(batch)} things; put several inputs in a tuple")
        return (inputs if isinstance(inputs, tuple | dict) else (inputs,), *targets)

    def _program(self, objective: str, args: tuple[Any, ...]) -> Program:
        members = [slot.trainings[objective] for slot in self.slots]
        shown = substitute(args, Stacked, lambda s: s.tensor[0])
        key = (objective, key_of(members[0], shown, {}))
        if (found := self._programs.get(key)) is not None:
            return found
        made = self._programs[key] = Program.record(members, shown)
        if made.obstacle is not None:
            self._stand_alone(f"{made.obstacle}: members run by themselves")
        elif self._check and torch.is_grad_enabled():
            self._verify(objective, made, args)
        return made

    def _stand_alone(self, why: str) -> None:
        if why not in self.notes:
            self.notes.append(why)
        if self.width > 1:
            self._line_up(1)

    def _verify(self, objective: str, program: Program, args: tuple[Any, ...]) -> None:
        """Compare the last member's gradients with those of its model run by itself; if they differ, do not fuse."""
        from outcore.fusion.verify import disagreement

        if self.width == 1 or program.random:
            return
        lane = self.lanes[-1]
        found = disagreement(lane, objective, program, self._cut(lane, args))
        if found is not None:
            warnings.warn(
                f"fused gradients disagree with the model's own in {found}; members run by themselves", stacklevel=4
            )
            program.obstacle = f"gradients of {found} disagreed"
            self._stand_alone(f"{program.obstacle}: members run by themselves")

    def _alone(self, lane: Lane, program: Program) -> bool:
        return program.obstacle is not None or (len(lane) == 1 and self.width == 1)

    def _cut(self, lane: Lane, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The part of per-member batches that is a lane's."""
        last = lane.first + len(lane)
        cut: tuple[Any, ...] = substitute(args, Stacked, lambda s: Stacked(s.tensor[lane.first : last]))
        return cut

    def _step(self, objective: str, args: tuple[Any, ...]) -> Tensor:
        program = self._program(objective, args)
        return self._collect([self._step_lane(lane, objective, program, self._cut(lane, args)) for lane in self.lanes])

    def _step_lane(self, lane: Lane, objective: str, program: Program, args: tuple[Any, ...]) -> Outcome:
        alone = self._alone(lane, program)
        scale = None
        if self._scale is not None:
            scale = self._scale.of(lane.first, len(lane), lane.alive.device)
        outcome = lane.forward(objective, program, args, alone=alone)
        grads = lane.gradients(objective, outcome.losses if scale is None else outcome.losses * scale, alone=alone)
        outcome.losses = outcome.losses.detach()
        lane.alive &= outcome.losses.isfinite()
        alive = lane.alive
        if self._scale is not None and scale is not None:
            usable = self._scale.unscale(grads, scale, lane.first)
            alive = alive & usable
        if self._clip is not None:
            last = lane.first + len(lane)
            clip_by_norm(grads, self._clip[lane.first : last].to(lane.alive.device))
        stepper = lane.steppers[objective]
        stepper.prepare(list(grads), None if self._scale is None else alive.tolist())
        whole = lane.alive.device.type == "cpu" and bool(alive.all())
        stepper.apply(grads, None if whole else alive)
        return outcome

    def _collect(self, outcomes: Sequence[Outcome]) -> Tensor:
        def joined(parts: list[Tensor]) -> Tensor:
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.losses = joined([o.losses for o in outcomes])
        self.metrics = {name: joined([o.metrics[name] for o in outcomes]) for name in outcomes[0].metrics}
        columns = [[t for _, t in leaves(o.output, Tensor)] for o in outcomes]
        made = iter([joined(list(row)) for row in zip(*columns, strict=True)])
        self.output = substitute(outcomes[0].output, Tensor, lambda _: next(made))
        return self.losses


def _same_settings(a: nn.Module, b: nn.Module) -> bool:
    from outcore.fusion.call import settings

    pairs = zip(a.modules(), b.modules(), strict=False)
    return all(type(x) is type(y) and settings(x) == settings(y) for x, y in pairs)
