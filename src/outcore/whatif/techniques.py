"""What can be asked of a step: the techniques, how each is written, and what it does to the tasks.

    amp  amp=fp16          autocast; bfloat16 unless said, or unless a GPU has none
    channels_last          images with channels innermost
    compile                torch.compile: element-wise operations are fused, and the host launches fewer kernels
    fused  fused_adam      the optimizer in one kernel
    graphs                 one CUDA graph: the host launches once
    batch=64               another batch
    within=9GiB            what `outcore.within` would do under that budget; or a share of what the step holds, 50%
    link=2x                links twice as fast
    layer3=free            a block that takes no time
    conv:0.5x              tasks that take half of their time: a block, a kind, a phase or a resource

and several of them joined with ``+``. A technique either changes how the job is trained (its *setup*, which is then
recorded again), or the recorded tasks by the primitives of `RecordedStep`, or both. Those that change the setup can
also be run, and so verified; a block that takes no time cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from outcore.errors import WhatIfError, suggest
from outcore.machine import Device
from outcore.machine.units import parse_budget
from outcore.whatif.compiled import compiled_tasks
from outcore.whatif.recorded_step import PHASES, RecordedStep, Task
from outcore.whatif.recording import SetupRecording
from outcore.whatif.setup import TrainingSetup

__all__ = ["TECHNIQUES", "Technique", "parse_techniques"]

_MOST_SAMPLES = 10**9
_MOST_FACTOR = 1e6


@dataclass(frozen=True)
class Technique:
    """One change; by itself it changes nothing."""

    usage: ClassVar[str] = ""
    doubt: ClassVar[float] = 0.02
    """How far the step may be off because of the technique's own model, as a share of the time that it changes."""
    runs: ClassVar[bool] = True
    """Whether a machine can run it, or it is only thought."""

    def on(self, device: Device) -> Technique:
        """The technique as it is used on a device."""
        return self

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        """How the job is trained with it."""
        return setup

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        """The recorded step with it."""
        return step

    def __str__(self) -> str:
        return self.usage


@dataclass(frozen=True)
class Amp(Technique):
    """Autocast: matrix products in 16 bits, with the casts that it adds."""

    dtype: torch.dtype | None = None
    """By default bfloat16 where the device multiplies it, else float16."""
    usage: ClassVar[str] = "amp"
    doubt: ClassVar[float] = 0.12

    def on(self, device: Device) -> Technique:
        if self.dtype is not None:
            return self
        return Amp(torch.float16 if device.kind == "cuda" and "bf16" not in device.rates else torch.bfloat16)

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, autocast=self.dtype or torch.bfloat16)

    def __str__(self) -> str:
        return {None: "amp", torch.bfloat16: "amp=bf16"}.get(self.dtype, "amp=fp16")


@dataclass(frozen=True)
class ChannelsLastFormat(Technique):
    """Images with channels innermost, weights alike."""

    usage: ClassVar[str] = "channels_last"
    doubt: ClassVar[float] = 0.12

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, channels_last=True)


@dataclass(frozen=True)
class Compiled(Technique):
    """`torch.compile` with its default backend."""

    usage: ClassVar[str] = "compile"
    doubt: ClassVar[float] = 0.25

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, compiled=True)

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        return compiled_tasks(step, recording)


@dataclass(frozen=True)
class FusedOptimizer(Technique):
    """The optimizer in one kernel over all parameters."""

    usage: ClassVar[str] = "fused"
    doubt: ClassVar[float] = 0.15

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        if setup.job.optimizer is None:
            raise WhatIfError(f"{setup.job.name} has no optimizer(params), so there is none to fuse")
        return replace(setup, fused_optimizer=True)


@dataclass(frozen=True)
class Graphs(Technique):
    """The step as one CUDA graph: one launch, and nothing else of the host."""

    usage: ClassVar[str] = "graphs"
    doubt: ClassVar[float] = 0.1
    REPLAY_S: ClassVar[float] = 30e-6
    """Host time of replaying a graph."""

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, cuda_graph=True)

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        launches = step.select(resource="host")
        if not launches:
            return step.noted("graphs: there is no GPU, so no launch to save")
        first = next(iter(step.tasks))
        replayed = step.insert(Task("replay", "host", self.REPLAY_S, kind="launch"), before=(), place=first)
        heads = [name for name, task in replayed.tasks.items() if any(a in launches for a in task.after)]
        changed = replayed.remove(launches)
        begin = next((name for name in heads if name in changed.tasks), None)
        if begin is None:
            return changed
        task = changed.tasks[begin]
        return replace(changed, tasks={**changed.tasks, begin: replace(task, after=(*task.after, "replay"))})


@dataclass(frozen=True)
class BatchSize(Technique):
    """Another batch size."""

    size: int = 1
    usage: ClassVar[str] = "batch=64"
    doubt: ClassVar[float] = 0.03

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, size=self.size)

    def __str__(self) -> str:
        return f"batch={self.size}"


@dataclass(frozen=True)
class Within(Technique):
    """A budget of memory, met as `outcore.within` meets it."""

    budget: str = "100%"
    usage: ClassVar[str] = "within=9GiB"
    doubt: ClassVar[float] = 0.15

    def setup(self, setup: TrainingSetup) -> TrainingSetup:
        return replace(setup, within=self.budget)

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        from outcore.whatif.budget import budgeted_tasks

        return budgeted_tasks(step, recording, parse_budget(self.budget, recording.peak_bytes))

    def __str__(self) -> str:
        return f"within={self.budget}"


@dataclass(frozen=True)
class FasterLink(Technique):
    """Links so many times as fast."""

    factor: float = 2.0
    runs: ClassVar[bool] = False
    usage: ClassVar[str] = "link=2x"

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        names = [n for resource in ("link", "copy") for n in step.select(resource=resource)]
        if not names:
            return step.noted("nothing of this step crosses a link by itself; ask with several GPUs")
        return step.scale(names, 1 / self.factor)

    def __str__(self) -> str:
        return f"link={self.factor:g}x"


@dataclass(frozen=True)
class Free(Technique):
    """A block that takes no time: the most that any work on it could gain."""

    target: str = ""
    runs: ClassVar[bool] = False
    usage: ClassVar[str] = "BLOCK=free"
    doubt: ClassVar[float] = 0.0

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        return step.remove(targeted(step, self.target))

    def __str__(self) -> str:
        return f"{self.target}=free"


@dataclass(frozen=True)
class Scaled(Technique):
    """Tasks that take so many times as long on the device."""

    target: str = ""
    factor: float = 1.0
    runs: ClassVar[bool] = False
    usage: ClassVar[str] = "TARGET:0.5x"
    doubt: ClassVar[float] = 0.0

    def tasks(self, step: RecordedStep, recording: SetupRecording) -> RecordedStep:
        chosen = targeted(step, self.target)
        if self.target not in step.resources:  # faster kernels are launched as slowly as before
            chosen = [name for name in chosen if step.tasks[name].kind != "launch"]
        return step.scale(chosen, self.factor)

    def __str__(self) -> str:
        return f"{self.target}:{self.factor:g}x"


def targeted(step: RecordedStep, target: str) -> list[str]:
    """The tasks that a name stands for: a block, a kind with its launches, a phase or a resource."""
    if target in step.blocks:
        return list(step.select(block=target))
    if target in step.resources:
        return list(step.select(resource=target))
    if target in PHASES:
        return list(step.select(phase=target))
    if not target or not any(target.lower() in kind.lower() for kind in step.kinds):
        known = (*step.blocks, *step.kinds, *PHASES, *step.resources)
        raise WhatIfError(
            f"no block, kind, phase or resource {target!r} in {step.name or 'the step'}; {suggest(target, known)}"
        )
    chosen = step.select(kind=target)
    launches = {name for run in chosen for name in step.tasks[run].after if step.tasks[name].kind == "launch"}
    return [name for name in step.tasks if name in launches or name in chosen]


def _dtype(value: str) -> Technique:
    known = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if value not in known:
        raise WhatIfError(f"amp={value} is not known; write amp, amp=bf16 or amp=fp16")
    return Amp(known[value])


def _batch(value: str) -> Technique:
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_SAMPLES:
        raise WhatIfError(f"batch={value} must be a whole number from 1 to {_MOST_SAMPLES:,}, for example batch=64")
    return BatchSize(int(value))


def _within(value: str) -> Within:
    parse_budget(value, 2**40)  # refused before anything is recorded
    return Within("".join(value.split()))


def _factor(text: str, what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)x?", text)
    if match is None or not 1 / _MOST_FACTOR <= float(match[1]) <= _MOST_FACTOR:
        raise WhatIfError(f"{what} must be a factor such as 2x or 0.5x, from {1 / _MOST_FACTOR:g} to {_MOST_FACTOR:g}")
    return float(match[1])


TECHNIQUES: dict[str, Callable[[str], Technique]] = {
    "amp": lambda value: _dtype(value) if value else Amp(),
    "channels_last": lambda value: ChannelsLastFormat(),
    "compile": lambda value: Compiled(),
    "fused": lambda value: FusedOptimizer(),
    "fused_adam": lambda value: FusedOptimizer(),
    "graphs": lambda value: Graphs(),
    "batch": _batch,
    "within": lambda value: _within(value),
    "link": lambda value: FasterLink(_factor(value, f"link={value}")),
}
"""By the name that is typed; each takes what stands behind ``=``."""
_WITH_VALUE = ("amp", "batch", "within", "link")
_ALONE = ("amp", "channels_last", "compile", "fused", "fused_adam", "graphs")


def parse_techniques(text: str) -> tuple[Technique, ...]:
    """The techniques that a text joins with ``+``; names of blocks and kinds are looked up later, in the step.

    >>> [str(t) for t in parse_techniques("amp+batch=64+layer3=free+conv:0.5x")]
    ['amp', 'batch=64', 'layer3=free', 'conv:0.5x']

    Raises:
        WhatIfError: one of them is not known; names those that are.
    """
    parts = [part.strip() for part in text.split("+")]
    found = tuple(_technique(part, text) for part in parts)
    for number, technique in enumerate(found):
        again = next((t for t in found[:number] if type(t) is type(technique) and _one_of(t, technique)), None)
        if again is not None:
            raise WhatIfError(f"{again} and {technique} in {text!r} are one technique; ask for it once")
    return found


def _one_of(first: Technique, second: Technique) -> bool:
    """Whether two techniques of a kind cannot stand beside each other: a step has one batch, but many blocks."""
    return not isinstance(first, Free | Scaled) or first == second


def _technique(part: str, whole: str) -> Technique:
    name, equals, value = part.partition("=")
    if equals and value == "free" and name and name not in TECHNIQUES:
        return Free(name)
    target, colon, factor = part.rpartition(":")
    if colon and target and not equals:
        return Scaled(target, _factor(factor, part))
    if name in TECHNIQUES:
        if equals and (name not in _WITH_VALUE or not value):
            raise WhatIfError(f"{part!r} is not understood; write {name}{'=…' if name not in _ALONE else ''}")
        if not equals and name not in _ALONE:
            raise WhatIfError(f"{name} needs a value, for example {_example(name)}")
        return TECHNIQUES[name](value)
    said = "amp, channels_last, compile, fused, graphs, batch=64, within=9GiB, link=2x, BLOCK=free or KIND:0.5x"
    where = f" in {whole!r}" if whole != part else ""
    near = suggest(name, TECHNIQUES) if name else ""
    hint = f"{near} " if near.startswith("did") else ""
    raise WhatIfError(f"unknown technique {part!r}{where}; {hint}known are {said}, joined with +")


def _example(name: str) -> str:
    return {"batch": "batch=64", "within": "within=9GiB", "link": "link=2x"}[name]
