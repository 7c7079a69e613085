"""Questions about a step and their answers: predicted, with an interval and the reason, and measured where asked.

    asked = outcore.whatif.ask(job, ["amp", "compile", "amp+compile"], verify=True)
    print(asked)

Each question is a list of techniques (`outcore.whatif.techniques`). The job is recorded as it is and as each question
would have it, both are simulated, and the answer is the difference. With `verify` both are also trained for some steps,
in turn, and the recorded step is anchored to the real one (`outcore.whatif.anchor`), so that what is compared is the
prediction of the change.

A gain has an interval like the step, and an interval on both sides of 1 is said to be *no clear change*: where the host
sets the pace, the same step takes some per cent more or less from one minute to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from outcore.cost.predicted.step_time import summed_spread_s
from outcore.errors import OutcoreError
from outcore.job import Job
from outcore.machine import Device, format_bytes, format_time
from outcore.whatif.anchor import Anchor
from outcore.whatif.clocks import SimulatedStep
from outcore.whatif.elsewhere import measured_here
from outcore.whatif.recorded_step import RecordedStep
from outcore.whatif.recording import SetupRecording, record_setup
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import Technique, parse_techniques
from outcore.whatif.trial import MeasuredSteps, run_in_turn, run_setup

__all__ = ["Answer", "Answers", "Verdict", "ask"]

Verdict = Literal["faster", "slower", "no clear change"]
_HOST_DOUBT = 0.2
"""How far the time in which the device waits for the host may be off, as a share of it."""
_LEAST_DOUBT = 0.04
"""How far any changed step may be off. With these two, 36 of the 50 steps of `benchmarks/whatif-gpu` lie inside."""
_ROOM = 0.8
"""Share of a GPU's free memory that two trials at once may need."""


@dataclass(frozen=True)
class Answer:
    """What a question would change."""

    question: str
    batch: int
    step_s: float
    low_s: float
    high_s: float
    """Between these the step lies in four cases of five."""
    gain: float
    """How many times as many samples per second as the job as it is."""
    gain_interval: tuple[float, float]
    """Between these the gain lies in four cases of five."""
    peak_bytes: int
    reason: str
    notes: tuple[str, ...] = ()
    trial: MeasuredSteps | None = None
    measured_gain: float | None = None
    not_run: str = ""
    """Why it was not measured, where that was asked for."""

    @property
    def verdict(self) -> Verdict:
        """Whether the technique helps, where the interval of its gain says so."""
        low, high = self.gain_interval
        return "faster" if low > 1 else "slower" if high < 1 else "no clear change"

    @property
    def error(self) -> float | None:
        """Predicted over measured step, less one."""
        return self.step_s / self.trial.step_s - 1 if self.trial is not None else None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {
            "question": self.question,
            "batch": self.batch,
            "step_s": self.step_s,
            "interval_s": [self.low_s, self.high_s],
            "samples_per_s": self.batch / self.step_s if self.step_s else None,
            "gain": self.gain if math.isfinite(self.gain) else None,
            "gain_interval": [limit if math.isfinite(limit) else None for limit in self.gain_interval],
            "verdict": self.verdict,
            "peak_bytes": self.peak_bytes,
            "reason": self.reason,
            "notes": list(self.notes),
        }
        if self.trial is not None:
            found |= {"measured_s": self.trial.step_s, "measured_gain": self.measured_gain, "error": self.error}
        if self.not_run:
            found["not_run"] = self.not_run
        return found


@dataclass(frozen=True)
class Answers:
    """A job as it is, and what each question would change."""

    job: str
    device: str
    base: Answer
    answers: tuple[Answer, ...]
    anchor: Anchor | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        anchor = None if self.anchor is None else {"device": self.anchor.device, "host": self.anchor.host}
        rows = [answer.to_json() for answer in self.answers]
        return {"job": self.job, "device": self.device, "as_it_is": self.base.to_json(), "anchor": anchor, "if": rows}

    def __str__(self) -> str:
        rows = [self.base, *self.answers]
        lines = [f"{self.job} on {self.device}, batch {self.base.batch}"]
        for answer in rows:
            low, high = format_time(answer.low_s), format_time(answer.high_s)
            said = f"  {answer.question}: {format_time(answer.step_s)} ({low} to {high}), {answer.gain:.2f}x"
            if answer.trial is not None and answer.error is not None:
                said += f"; measured {format_time(answer.trial.step_s)} ({answer.error:+.1%})"
            lines.append(f"{said}: {answer.reason}")
        return "\n".join(lines)


def ask(
    job: Job,
    questions: Sequence[str],
    *,
    device: Device | None = None,
    batch: int | None = None,
    verify: bool = False,
    measure: bool = False,
    seconds: float = 3.0,
    progress: Callable[[str], None] | None = None,
) -> Answers:
    """What a training step would take, if.

    >>> import outcore, torch
    >>> from outcore.machine import parse
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))),
    ...     batch=lambda size: (torch.randn(size, 64), torch.randn(size, 64)),
    ...     loss=torch.nn.functional.mse_loss,
    ...     optimizer=torch.optim.Adam,
    ...     size=8,
    ... )
    >>> found = outcore.whatif.ask(job, ["linear:0.5x", "graphs"], device=parse("h100").devices[0])
    >>> [answer.gain > 1.5 for answer in found.answers]  # the host sets the pace of so small a network
    [False, True]

    Args:
        job: what is trained.
        questions: techniques joined with ``+``, such as ``"amp+compile"``; see `outcore.whatif.techniques`.
        device: for which; this machine's if not given.
        batch: size of the batch; the job's own if not given.
        verify: train the job as it is and each variant for some steps, here.
        measure: run every call of the job alone, and carry what was measured over to the variants.
        seconds: how long each variant is trained with `verify`.
        progress: told what is done.

    Raises:
        WhatIfError: a technique, block or kind is not known; names those that are.
    """
    parsed = [(text, parse_techniques(text)) for text in questions]
    where = device if device is not None else _here()
    wanted = [(text, tuple(technique.on(where) for technique in techniques)) for text, techniques in parsed]
    tell = progress or (lambda _: None)
    plain = TrainingSetup(job, batch)
    tell(f"recording {job.name}")
    estimated = record_setup(plain, where)
    base = measured_here(_here(), where)(plain) if measure else estimated
    trial = None
    if verify:
        tell("training it as it is")
        trial = run_setup(plain, _kind(where), seconds=seconds)
    anchor = _anchor(base, trial)
    first = _simulated(base.step, anchor)
    shown = _answer("as it is", base, first, (), first, anchored=anchor is not None, trial=trial)
    answers = []
    for text, techniques in wanted:
        tell(f"asking for {text}")
        variant = _variant(plain, techniques, where, estimated, base)
        step = variant.step
        for technique in techniques:
            step = technique.tasks(step, variant)
        beside, own, why = trial, None, ""
        if trial is not None:
            tell(f"training it with {text}")
            beside, own, why = _trained(plain, variant.setup, techniques, trial, seconds)
        factors = anchor if beside is trial else _anchor(base, beside)
        before = _simulated(base.step, factors)
        answer = _answer(text, variant, _simulated(step, factors), techniques, before, anchored=trial is not None)
        if own is not None and beside is not None:
            gain = variant.setup.batch / own.step_s * beside.step_s / plain.batch
            answer = replace(answer, trial=own, measured_gain=gain)
        answers.append(replace(answer, not_run=why))
    return Answers(job.name, where.name, shown, tuple(answers), anchor)


def _anchor(base: SetupRecording, trial: MeasuredSteps | None) -> Anchor | None:
    return None if trial is None else Anchor.of(base.step, trial.step_s, trial.busy_s, trial.issue_s)


def _variant(
    plain: TrainingSetup,
    techniques: Sequence[Technique],
    where: Device,
    estimated: SetupRecording,
    base: SetupRecording,
) -> SetupRecording:
    """The job as a question would have it trained, carried from what was measured of it."""
    setup = plain
    for technique in techniques:
        setup = technique.setup(setup)
    if setup == plain:
        return base
    found = record_setup(setup, where)
    return found if base is estimated else found.carried(estimated, base)


def _simulated(step: RecordedStep, anchor: Anchor | None) -> SimulatedStep:
    return (anchor.apply(step) if anchor is not None else step).simulate()


def _answer(
    question: str,
    recording: SetupRecording,
    found: SimulatedStep,
    techniques: Sequence[Technique],
    before: SimulatedStep,
    *,
    anchored: bool,
    trial: MeasuredSteps | None = None,
) -> Answer:
    batch = recording.setup.batch
    low_s, high_s = interval_s(found, before, techniques, anchored=anchored)
    base_s = (before.step_s, before.step_s)
    if not any(technique.runs for technique in techniques):
        # What was only said to take less errs as it did before: both steps are at the same end of their intervals.
        base_s = interval_s(before, before, (), anchored=anchored)
    ends = ((before.step_s, found.step_s), *zip(base_s, (low_s, high_s), strict=True))
    gains = sorted(_gain(base, own, batch / before.step.batch) for base, own in ends)
    return Answer(
        question,
        batch,
        found.step_s,
        low_s,
        high_s,
        _gain(before.step_s, found.step_s, batch / before.step.batch),
        (gains[0], gains[-1]),
        recording.peak_bytes if found.step.peak_bytes is None else found.step.peak_bytes,
        reason_of(before, found, same=not techniques),
        found.step.notes + _memory_notes(recording),
        trial,
        1.0 if trial is not None else None,
    )


def _gain(before_s: float, after_s: float, batches: float) -> float:
    """How many times as many samples per second, of a batch so many times as large."""
    return batches * before_s / after_s if after_s else math.inf


def interval_s(
    found: SimulatedStep, before: SimulatedStep, techniques: Sequence[Technique], *, anchored: bool
) -> tuple[float, float]:
    """Between which the step with some techniques lies in four cases of five.

    Three things err independently: the times of the tasks, the model of each technique as a share of what it changes,
    and the host, as a share of the time in which the device waits for it. A part that is free or twice as fast is so
    because it was said: that errs with the times alone.
    """
    changed = any(technique.runs for technique in techniques)
    less_s, more_s = spread_s(found.step, before.step if anchored else None)
    changed_s = abs(found.step_s - found.step.batch / before.step.batch * before.step_s)
    own_s = sum(technique.doubt for technique in techniques) * max(changed_s, 0.2 * found.step_s)
    waits_s = max(0.0, found.step_s - found.busy_s("device")) if "host" in found.step.resources else 0.0
    host_s = _HOST_DOUBT * waits_s if changed else 0.0
    least_s = _LEAST_DOUBT * found.step_s if changed else 0.0
    below_s, above_s = (math.hypot(times_s, own_s, host_s, least_s) for times_s in (less_s, more_s))
    if not changed or not found.step_s:
        return max(0.0, found.step_s - below_s), found.step_s + above_s
    # As many times less as more: where several techniques take most of a step away, it is still not nothing.
    return found.step_s / (1 + below_s / found.step_s), found.step_s + above_s


def _memory_notes(recording: SetupRecording) -> tuple[str, ...]:
    if recording.setup.within is not None or recording.peak_bytes <= recording.device.memory_bytes:
        return ()
    has, needs = format_bytes(recording.device.memory_bytes), format_bytes(recording.peak_bytes)
    return (f"does not fit: the step holds {needs}, {recording.device.name} has {has}",)


def spread_s(step: RecordedStep, known: RecordedStep | None = None) -> tuple[float, float]:
    """How far below and above the times of the tasks may lie, as `outcore profile` has it (`summed_spread_s`).

    Of a step that was really run the sum of its tasks is `known`: those that are as they were do not err, and of one
    that changed, by half as much, since what is wrong with both of its times falls out.
    """
    below: list[tuple[str, float, float]] = []
    above: list[tuple[str, float, float]] = []
    for task in step.tasks.values():
        before = known.tasks.get(task.name) if known is not None else None
        share = 1.0 if known is None else 0.5
        if before is not None and math.isclose(before.time_s, task.time_s, rel_tol=0.01):
            share = 0.0
        if task.high_s > 0:
            below.append((task.kind, task.time_s, share * (task.time_s - task.low_s)))
            above.append((task.kind, task.time_s, share * (task.high_s - task.time_s)))
    return summed_spread_s(below), summed_spread_s(above)


def reason_of(before: SimulatedStep, after: SimulatedStep, *, same: bool = False) -> str:
    """Why a step takes what it takes, in a sentence: which resource sets the pace, and what changed of it."""
    device = format_time(after.busy_s("device"))
    if "host" not in after.step.resources:
        if same:
            return f"one clock: {device} of work on the processor"
        return f"work on the processor {format_time(before.busy_s('device'))} → {device}"
    host = format_time(after.busy_s("host"))
    pace = after.bound_by
    if same:
        return f"the {pace} sets the pace: {host} of launches, {device} of work on the device"
    changes = [
        f"{name} {format_time(before.busy_s(resource))} → {format_time(after.busy_s(resource))}"
        for name, resource in (("device work", "device"), ("launches", "host"), ("links", "link"))
        if abs(after.busy_s(resource) - before.busy_s(resource)) > 0.005 * max(before.busy_s(resource), 1e-9)
    ]
    said = ", ".join(changes) or "nothing that counts changes"
    return f"{said}; the {pace} sets the pace"


def _trained(
    plain: TrainingSetup, setup: TrainingSetup, techniques: Sequence[Technique], before: MeasuredSteps, seconds: float
) -> tuple[MeasuredSteps, MeasuredSteps | None, str]:
    """Trials of the job as it is and of a variant, in turn if both fit in memory; or why there is none of the variant.

    On a CPU the clock is the process's own, which others do not lengthen, and a second model might not fit.
    """
    thought = [str(technique) for technique in techniques if not technique.runs]
    if thought:
        return before, None, f"{', '.join(thought)} cannot be run"
    try:
        if before.device == "cuda" and before.peak_bytes is not None:
            grown = setup.batch / plain.batch
            if (1 + max(1.0, grown)) * before.peak_bytes < _ROOM * torch.cuda.mem_get_info()[0]:
                beside, own = run_in_turn((plain, setup), before.device, seconds=seconds)
                return beside, own, ""
        return before, run_setup(setup, before.device, seconds=seconds), ""
    except (OutcoreError, RuntimeError) as error:
        return before, None, str(error).splitlines()[0] if str(error) else type(error).__name__


def _here() -> Device:
    from outcore.machine import known

    return known().devices[0]


def _kind(device: Device) -> str:
    return "cuda" if device.kind == "cuda" else "cpu"
