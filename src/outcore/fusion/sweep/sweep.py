"""Train many configurations of one job together.

Configurations whose models have the same shapes and take the same batch size train in one array; others form arrays
of their own, by themselves. Every `interval` steps each member is evaluated on held-out batches and reported; one
that is given up, done or diverged makes room, and its slot goes to the next configuration while the others train on,
with their weights and optimizers as they are.

Which way of running is fastest is measured, for no more than a small part of what there is to train; where that is too
little to measure, or nothing is faster than one configuration after the other, a plain loop runs.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.fusion.array import FusedArray
from outcore.fusion.fuse import fuse
from outcore.fusion.member import independent_copy
from outcore.fusion.program.autotune import AutotuneResult, group_width
from outcore.fusion.runner import RunMode
from outcore.fusion.sweep.curves import draw_curves
from outcore.fusion.sweep.plain_loop import PlainLoop
from outcore.fusion.sweep.recipe import Recipe
from outcore.fusion.sweep.trials import Outcome, Trial, TrialResult, TrialSource

_MEASURED = 120
"""About how many steps of single members measuring takes: two serial ones, two ways with two and with four members."""
_WORTH = 5.0
"""Measuring pays if there is at least so many times its work to train."""
_LONG_STEP_S = 0.05
"""A step that takes longer on a CPU is made of operations that fill it: fusing them gains nothing."""


@dataclass(frozen=True)
class SweepOptions:
    """How to sweep."""

    job: str
    directory: Path
    inputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    batch: int | None = None
    steps: int = 100
    interval: int = 10
    """Steps between two reports."""
    members: int = 16
    """Configurations that train at the same time."""
    held_out: int = 2
    """Batches a configuration is evaluated on."""
    device: str = "cpu"
    amp: bool = False
    measure: bool = True
    """Measure which way of running is fastest."""
    seed: int = 0
    narrow: bool = True
    """Let an array shrink once there is nothing left to refill its slots with."""


@dataclass
class _Group:
    """Configurations that train in one array."""

    size: int
    array: FusedArray | PlainLoop
    slots: list[Trial | None]
    done: list[int]
    """Steps each slot's trial has made."""
    judged_on: list[tuple[Any, Any]]
    step: int = 0


@dataclass
class Sweep:
    """A sweep in progress."""

    options: SweepOptions
    source: TrialSource
    results: dict[int, TrialResult] = field(default_factory=dict)
    on_change: Callable[[Sweep], None] = lambda sweep: None
    on_progress: Callable[[Sweep], None] = lambda sweep: None
    """Called often: with every step, and with whatever takes its time before the first."""
    best: TrialResult | None = None
    choices: list[AutotuneResult] = field(default_factory=list)
    member_steps: int = 0
    activity: str = "starting"
    """What is being done now."""
    stepped: int = 0
    """Steps of single members so far, also those of the interval that is not judged yet."""
    seconds: float = 0.0
    """Spent training, without building models."""
    _exhausted: bool = False
    """Whether the source has no more trials."""

    @cached_property
    def recipe(self) -> Recipe:
        """How trials become models, optimizers and batches."""
        o = self.options
        return Recipe(o.job, o.inputs, o.arguments, o.batch, o.device, o.seed)

    def run(self) -> list[TrialResult]:
        """Train everything the source has; returns a result per configuration."""
        self.options.directory.mkdir(parents=True, exist_ok=True)
        self.results = {r.number: r for r in self.source.finished()}
        done = [r for r in self.results.values() if r.state == "complete" and r.value is not None]
        self.best = min(done, key=_value, default=None)
        waiting: dict[Hashable, list[tuple[Trial, nn.Module]]] = {}
        groups: dict[Hashable, _Group] = {}
        while True:
            self._ask(waiting, groups)
            for key in [k for k, group in groups.items() if not any(group.slots)]:
                if not 0 < len(waiting.get(key, ())) <= len(groups[key].slots):
                    del groups[key]  # before others are made, which may need its memory
            self._place(waiting, groups)
            if not groups:
                break
            for key, group in list(groups.items()):
                if self.options.narrow and self._exhausted and key not in waiting:
                    self._narrow(group)
                self._train(group)
        self.write()
        (self.options.directory / "curves.svg").write_text(draw_curves(list(self.results.values())), encoding="utf-8")
        return list(self.results.values())

    @property
    def serial_s(self) -> float | None:
        """What a step of one member takes in plain PyTorch, where it was measured."""
        return self.choices[0].serial_s if self.choices else None

    def achieved(self) -> float | None:
        """How many times faster than one after the other, for what was trained in this run."""
        if not self.choices or not self.seconds:
            return None
        serial = sum(c.serial_s for c in self.choices) / len(self.choices)
        return self.member_steps * serial / self.seconds

    def write(self) -> None:
        """One row per configuration, as CSV; complete at any moment."""
        names = list(dict.fromkeys(k for r in self.results.values() for k in r.settings))
        aside = self.options.directory / "results.csv.part"
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", *names, "state", "steps", "loss"])
            for result in sorted(self.results.values(), key=lambda r: r.number):
                row = [result.settings.get(n, "") for n in names]
                writer.writerow(
                    [result.number, *row, result.state, result.steps, "" if result.value is None else result.value]
                )
        aside.replace(self.options.directory / "results.csv")

    # Making members

    def _ask(self, waiting: dict[Hashable, list[tuple[Trial, nn.Module]]], groups: dict[Hashable, _Group]) -> None:
        """Ask for as many configurations as there is room for."""
        running = sum(slot is not None for group in groups.values() for slot in group.slots)
        while running + sum(map(len, waiting.values())) < self.options.members:
            trial = self.source.ask()
            if trial is None:
                self._exhausted = True
                return
            self.results[trial.number] = TrialResult(trial.number, trial.settings)
            self._say(f"building trial {trial.number}")
            model = self.recipe.model(trial)
            waiting.setdefault(self.recipe.key(trial, model), []).append((trial, model))

    def _place(self, waiting: dict[Hashable, list[tuple[Trial, nn.Module]]], groups: dict[Hashable, _Group]) -> None:
        for key in list(waiting):
            if key in groups:
                self._fill(groups[key], waiting[key])
            else:
                groups[key] = self._start(waiting.pop(key))
            if key in waiting and not waiting[key]:
                del waiting[key]

    def _start(self, members: Sequence[tuple[Trial, nn.Module]]) -> _Group:
        trials = [trial for trial, _ in members]
        size = self.recipe.batch_size(trials[0])
        slots: list[Trial | None] = list(trials)
        models = [model for _, model in members]
        terms: dict[str, Any] = {
            "loss": self.recipe.loss(trials[0]),
            "optimizer": lambda params, i: self.recipe.optimizer(slots[i] or trials[i], params),
            "autocast": torch.bfloat16 if self.options.amp else None,
        }
        judged_on = [self.recipe.batch(trials[0], size, -1 - n) for n in range(self.options.held_out)]
        batch = self.recipe.batch(trials[0], size, 0)
        array: FusedArray | PlainLoop
        if self.options.measure and (len(models) == 1 or not self._is_worth_measuring(models[0], batch, terms["loss"])):
            array = PlainLoop(models, **terms)
        else:
            array = fuse(models, way=_usual_way(models[0], len(models)), **terms)
            if self.options.measure:
                self._say("measuring which way of running is fastest")
                choice = array.tune(*batch, seconds=0.1)
                self.choices.append(choice)
                if choice.speedup <= 1:
                    array = PlainLoop([array[i].copy() for i in range(len(models))], **terms)
        return _Group(size, array, slots, [0] * len(slots), judged_on)

    def _is_worth_measuring(self, model: nn.Module, batch: tuple[Any, Any], loss: Callable[..., Any]) -> bool:
        """Whether there is enough to train, of steps that are short enough."""
        if self.options.members * self.options.steps < _WORTH * _MEASURED:
            return False
        if self.options.device != "cpu":
            return True
        self._say("timing one step")
        plain = PlainLoop(
            [independent_copy(model)], loss=loss, optimizer=lambda params, i: torch.optim.SGD(params, lr=0.0)
        )
        plain.step(*batch)
        begun = time.perf_counter()
        plain.step(*batch)
        return time.perf_counter() - begun < _LONG_STEP_S

    def _say(self, activity: str) -> None:
        self.activity = activity
        self.on_progress(self)

    def _fill(self, group: _Group, members: list[tuple[Trial, nn.Module]]) -> None:
        if not any(group.slots):
            group.step = 0  # a new round begins at the first batch, as the one before
        for slot, occupant in enumerate(group.slots):
            if occupant is None and members:
                trial, model = members.pop(0)
                group.slots[slot] = trial
                group.array.refill(slot, model)
                group.done[slot] = 0

    def _narrow(self, group: _Group) -> None:
        """Drop empty slots once they are half of all, so that the last trials do not pay for them."""
        kept = [slot for slot, trial in enumerate(group.slots) if trial is not None]
        if kept and 2 * len(kept) <= len(group.slots):
            begun = time.perf_counter()
            group.array.keep(kept)
            group.slots[:] = [group.slots[slot] for slot in kept]
            group.done[:] = [group.done[slot] for slot in kept]
            self.seconds += time.perf_counter() - begun

    # Training

    def _train(self, group: _Group) -> None:
        """Train one interval of a group, then evaluate its members."""
        if not any(group.slots):
            return
        some = next(t for t in group.slots if t is not None)
        for slot, occupant in enumerate(group.slots):
            if occupant is None:
                group.array.stop(slot)
        left = min(self.options.steps - n for t, n in zip(group.slots, group.done, strict=True) if t is not None)
        count = min(self.options.interval, left)
        begun = time.perf_counter()
        training = sum(t is not None for t in group.slots)
        for _ in range(count):
            group.array.step(*self.recipe.batch(some, group.size, group.step))
            group.step += 1
            self.stepped += training
            self._say("training")
        values = self._judge(group)
        self.seconds += time.perf_counter() - begun
        self.member_steps += count * training
        self._report_and_decide(group, count, values)
        self.write()
        self.on_change(self)

    def _judge(self, group: _Group) -> list[float]:
        losses = [group.array.evaluate(*batch) for batch in group.judged_on]
        return [sum(of_one) / len(of_one) for of_one in zip(*(each.tolist() for each in losses), strict=True)]

    def _report_and_decide(self, group: _Group, count: int, values: Sequence[float]) -> None:
        """Report all members, then decide on each: those that trained side by side compete with each other."""
        status, alive = group.array.status, []
        for slot, trial in enumerate(group.slots):
            if trial is None:
                continue
            group.done[slot] += count
            result = self.results[trial.number]
            result.steps = group.done[slot]
            if status[slot] == "diverged" or not math.isfinite(values[slot]):
                self._finish(group, slot, result, "diverged", None)
            else:
                result.value = values[slot]
                result.curve.append((result.steps, values[slot]))
                self.source.report(trial.number, result.steps, values[slot])
                alive.append((slot, result))
        for slot, result in alive:
            if result.steps >= self.options.steps:
                self._keep_best(group, slot, result)
                self._finish(group, slot, result, "complete", result.value)
            elif self.source.hopeless(result.number):
                self._finish(group, slot, result, "pruned", result.value)

    def _finish(self, group: _Group, slot: int, result: TrialResult, state: Outcome, value: float | None) -> None:
        result.state = state
        self.source.tell(result.number, state, value)
        group.slots[slot] = None
        group.array.stop(slot)

    def _keep_best(self, group: _Group, slot: int, result: TrialResult) -> None:
        if self.best is None or _value(result) < _value(self.best):
            self.best = result
            aside = self.options.directory / "best.safetensors.part"
            group.array[slot].save(aside)
            aside.replace(self.options.directory / "best.safetensors")


def _usual_way(model: nn.Module, members: int) -> RunMode:
    """All fused; on a GPU as a CUDA graph, and in the order of memory that its convolutions prefer."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    convolves = any(p.dim() == 4 for p in model.parameters())
    return RunMode(group_width(members) if on_gpu else members, graphed=on_gpu, channels_last=on_gpu and convolves)


def _value(result: TrialResult) -> float:
    return math.inf if result.value is None else result.value
