"""More GPUs: what a step takes on 1, 2, 4, ... of them, where the time goes, and whether the next one helps.

*Weak* scaling gives every GPU the job's batch; *strong* scaling divides the job's batch among them. The efficiency of
`n` GPUs is their samples per second over `n` times those of one. Four ways to use them are compared: data parallel,
sharded (`outcore.whatif.data_parallel`), a pipeline and GEMS (`outcore.whatif.pipelines`).

All ranks of data parallel training do the same, so one of them is simulated, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from outcore.errors import WhatIfError, suggest
from outcore.job import Job
from outcore.machine import Device, format_bytes, format_time
from outcore.whatif.clocks import SimulatedStep
from outcore.whatif.data_parallel import data_parallel, sharded
from outcore.whatif.elsewhere import record_on
from outcore.whatif.links import ClusterLink
from outcore.whatif.pipelines import PipelinePlans
from outcore.whatif.recorded_step import RecordedStep
from outcore.whatif.recording import SetupRecording
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import Technique

__all__ = ["LEAST_GAIN", "STRATEGIES", "ScalingPoint", "ScalingTable", "scale_out"]

Strategy = Literal["data_parallel", "sharded", "gpipe", "1f1b", "gems"]
STRATEGIES: tuple[Strategy, ...] = ("data_parallel", "sharded", "gpipe", "1f1b", "gems")
WOVEN: tuple[Strategy, ...] = ("data_parallel", "sharded")
"""Those in which every rank runs the recorded step, with collectives woven into it."""
_FULL = 0.8
LEAST_GAIN = 0.05
"""A GPU more helps if samples per second grow by more than a twentieth of what one brings."""


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One number of GPUs, used in one way."""

    gpus: int
    strategy: str
    batch: int
    """Samples of a step over all GPUs."""
    step_s: float
    samples_per_s: float
    efficiency: float
    compute_s: float
    """Work of the device in a step."""
    communication_s: float
    """What the link does in a step, hidden or not."""
    exposed_s: float
    """What of it the device waits for."""
    said: str = ""


@dataclass(frozen=True)
class ScalingTable:
    """Numbers of GPUs, and what each gives."""

    job: str
    device: str
    link: str
    mode: Literal["weak", "strong"]
    points: tuple[ScalingPoint, ...]
    refused: tuple[str, ...]
    """Ways that cannot be used, each with the reason."""
    weight_bytes: int
    largest_block: tuple[str, int]
    """The block with the most weights, and their bytes."""
    hidden_from: int | None = None
    """The batch of a GPU from which on the first all-reduce that is waited for would be hidden; None if not found."""
    launch_s: float | None = None
    """What the host of one GPU takes to issue a step, where that and not the GPU's work sets the pace."""

    def of(self, strategy: str) -> list[ScalingPoint]:
        """The points of one way, by the number of GPUs."""
        return sorted((p for p in self.points if p.strategy == strategy), key=lambda p: p.gpus)

    def best(self, gpus: int) -> ScalingPoint:
        """The fastest way to use so many."""
        found = [p for p in self.points if p.gpus == gpus]
        if not found:
            raise WhatIfError(f"{gpus} GPUs were not asked for; known are {sorted({p.gpus for p in self.points})}")
        return max(found, key=lambda p: p.samples_per_s)

    def helps(self, strategy: str = "data_parallel") -> dict[int, bool]:
        """By number of GPUs: whether they train faster than every smaller number that was asked for."""
        found: dict[int, bool] = {}
        points = self.of(strategy)
        for number, after in enumerate(points[1:], 1):
            before = max(points[:number], key=lambda p: p.samples_per_s)
            more = LEAST_GAIN * (after.gpus / before.gpus - 1)
            found[after.gpus] = after.samples_per_s > before.samples_per_s * (1 + more)
        return found

    def verdict(self, strategy: str = "data_parallel") -> str:
        """A few sentences: up to how many GPUs it pays, what stops it, and what would help."""
        said = self._scaling_verdict(strategy)
        if self.launch_s is None or not self.of(strategy):
            return said
        work = format_time(self.of(strategy)[0].compute_s)
        return (
            f"{said} On one GPU the host sets the pace: it issues calls for {format_time(self.launch_s)}, "
            f"the GPU works {work} of it; a larger batch or CUDA graphs would fill the GPU."
        )

    def _scaling_verdict(self, strategy: str) -> str:
        points = self.of(strategy)
        if len(points) < 2:
            return "One number of GPUs says nothing of scaling; ask for several."
        name, nbytes = self.largest_block
        hidden = [p for p in points if p.gpus > 1 and not _is_exposed(p)]
        shown = [p for p in points if p.gpus > 1 and _is_exposed(p)]
        helps = self.helps(strategy)
        stuck = next((gpus for gpus, good in helps.items() if not good), None)
        what = f"the all-reduce of {format_bytes(self.weight_bytes)} of gradients"
        if nbytes > 0.5 * self.weight_bytes:
            what += f" ({format_bytes(nbytes)} of them in {name})"
        if not shown:
            last = points[-1]
            said = f"up to {last.gpus} GPUs over {self.link} {what} is hidden"
            if last.efficiency >= _FULL:
                return f"{said}: {last.efficiency:.0%} efficiency."
            each = last.batch // last.gpus
            return f"{said}, but {each} samples do not fill a GPU: {last.efficiency:.0%} efficiency."
        first = shown[0]
        upto = hidden[-1].gpus if hidden and hidden[-1].gpus < first.gpus else 1
        said = f"beyond {upto} GPU{'s' if upto > 1 else ''} over {self.link} {what} is no longer hidden: "
        said += f"{first.gpus} wait {format_time(first.exposed_s)} of {format_time(first.step_s)}"
        if stuck is not None:
            slower = self._at(points, stuck)
            previous = max(points[: points.index(slower)], key=lambda p: p.samples_per_s)
            word = "no faster" if slower.samples_per_s >= 0.98 * previous.samples_per_s else "slower"
            said += f"; {stuck} GPUs train {word} than {previous.gpus}"
        else:
            said += f"; each GPU more still helps, at {points[-1].efficiency:.0%} efficiency with {points[-1].gpus}"
        if self.hidden_from is not None:
            said += f". With a batch of {self.hidden_from} on each GPU it would be hidden"
        return f"{said}."

    def _at(self, points: Sequence[ScalingPoint], gpus: int) -> ScalingPoint:
        return next(p for p in points if p.gpus == gpus)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "job": self.job,
            "device": self.device,
            "link": self.link,
            "mode": self.mode,
            "weight_bytes": self.weight_bytes,
            "points": [asdict(point) for point in self.points],
            "refused": list(self.refused),
            "verdict": self.verdict(),
        }


def scale_out(
    job: Job,
    gpus: Sequence[int],
    link: ClusterLink,
    *,
    device: Device,
    batch: int | None = None,
    mode: Literal["weak", "strong"] = "weak",
    strategies: Sequence[str] = ("data_parallel", "sharded"),
    techniques: Sequence[Technique] = (),
    base: Callable[[TrainingSetup], SetupRecording] | None = None,
) -> ScalingTable:
    """What a job takes on several numbers of GPUs.

    Args:
        job: what is trained.
        gpus: how many.
        link: what joins them.
        device: each of them.
        batch: of one GPU (weak) or of all (strong); the job's own if not given.
        mode: whether every GPU gets the batch, or a share of it.
        strategies: how they are used: data_parallel, sharded, gpipe, 1f1b, gems.
        techniques: applied to the step of every rank.
        base: how a setup is recorded; by estimate for the device if not given.

    Raises:
        WhatIfError: a number or a strategy makes no sense; names those that do.
    """
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise WhatIfError(f"unknown strategy {strategy!r}; {suggest(strategy, STRATEGIES)}")
    ways = tuple(dict.fromkeys(strategies))
    if not ways:
        raise WhatIfError(f"no strategy was given; known are {', '.join(STRATEGIES)}")
    counts = sorted(set(gpus))
    if not counts or counts[0] < 1:
        raise WhatIfError("numbers of GPUs begin at 1; give for example --gpus 1,2,4,8")
    asked = TrainingSetup(job, batch)
    for technique in techniques:
        asked = technique.setup(asked)
    whole = asked.batch
    if mode == "strong" and whole < counts[-1]:
        raise WhatIfError(
            f"a batch of {whole} cannot be divided among {counts[-1]} GPUs; give --batch or use weak scaling"
        )
    recordings: dict[int, tuple[SetupRecording, RecordedStep]] = {}
    record = base if base is not None else (lambda setup: record_on(setup, device))

    def recorded(size: int) -> tuple[SetupRecording, RecordedStep]:
        if size not in recordings:
            found = record(replace(asked, size=size))
            step = found.step
            for technique in techniques:
                step = technique.tasks(step, found)
            recordings[size] = (found, step)
        return recordings[size]

    alone, alone_step = recorded(whole)
    single = alone_step.simulate()
    if not single.step_s > 0:
        raise WhatIfError(f"nothing is left of a step of {job.name} that could be divided; ask for less to be free")
    one = whole / single.step_s
    points: list[ScalingPoint] = []
    refused: list[str] = []
    plans = PipelinePlans(link, recorded)
    whole_steps = [str(t) for t in techniques if t.runs and type(t).tasks is not Technique.tasks]
    for strategy in [way for way in ways if way not in WOVEN and whole_steps]:
        refused.append(f"{strategy}: what {whole_steps[0]} makes of a pipeline's stages is not known")
        ways = tuple(way for way in ways if way != strategy)
    for count in counts:
        own = whole if mode == "weak" else max(1, whole // count)
        found, step = recorded(own)
        for strategy in ways:
            point = _point(strategy, found, step, count, plans, one)
            if isinstance(point, ScalingPoint):
                points.append(point)
            else:
                refused.append(f"{strategy} on {count} GPUs: {point}")
    if not points:
        raise WhatIfError(f"none of it can be done: {refused[0]}")
    costs = alone.profile.costs
    sizes: dict[str, int] = {}
    for parameter, nbytes in costs.parameters.items():
        top = parameter.split(".")[0]
        sizes[top] = sizes.get(top, 0) + nbytes
    largest = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    hidden_from = None
    waits = [p for p in points if p.strategy == "data_parallel" and p.gpus > 1 and _is_exposed(p)]
    if waits:
        own = waits[0].batch // waits[0].gpus
        for size in (own * 2, own * 4, own * 8):
            point = _point("data_parallel", *recorded(size), waits[0].gpus, plans, one)
            if isinstance(point, ScalingPoint) and not _is_exposed(point):
                hidden_from = size
                break
    weights = sum(costs.parameters.values())
    shown = (job.name, device.name, link.name, mode)
    launch_s = single.busy_s("host") if single.bound_by == "host" else None
    return ScalingTable(*shown, tuple(points), tuple(refused), weights, largest, hidden_from, launch_s)


def _is_exposed(point: ScalingPoint) -> bool:
    """Whether more than a twentieth of the step is spent waiting for the link."""
    return point.exposed_s > 0.05 * point.step_s


def _point(
    strategy: str, found: SetupRecording, step: RecordedStep, count: int, plans: PipelinePlans, one: float
) -> ScalingPoint | str:
    own, link = found.setup.batch, plans.link
    if count == 1:
        return _measured_point(strategy, 1, own, step.simulate(), one, link)
    if strategy in WOVEN:
        weave = data_parallel if strategy == "data_parallel" else sharded
        woven = weave(step, found, count, link)
        return _measured_point(strategy, count, own, woven.simulate(), one, link)
    made = plans.step(found, count, strategy)  # type: ignore[arg-type]
    if isinstance(made, str):
        return made
    rate = own * count / made.step_s
    device_s = step.simulate().busy_s("device")
    waits_s = made.bubble * made.step_s
    return ScalingPoint(
        count, strategy, own * count, made.step_s, rate, rate / (count * one), device_s, waits_s, waits_s, made.said
    )


def _measured_point(
    strategy: str, count: int, own: int, simulated: SimulatedStep, one: float, link: ClusterLink
) -> ScalingPoint:
    linked = "link" in simulated.step.resources
    busy_s = simulated.busy_s("link") if linked else 0.0
    exposed_s = simulated.exposed_s("link") if linked else 0.0
    step_s = simulated.step_s + link.steals * (busy_s - exposed_s)
    rate = own * count / step_s
    compute_s = simulated.busy_s("device")
    return ScalingPoint(count, strategy, own * count, step_s, rate, rate / (count * one), compute_s, busy_s, exposed_s)
