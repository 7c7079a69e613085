"""More GPUs: what a step takes on 1, 2, 4, ... of them, where the time goes, and whether the next one helps.

*Weak* scaling gives every GPU the job's batch; *strong* scaling divides the job's batch among them. The efficiency of
`n` GPUs is their samples per second over `n` times those of one. Four ways to use them are compared: data parallel,
sharded (`outcore.whatif.data_parallel`), a pipeline and GEMS (`outcore.whatif.pipelines`).

All ranks of data parallel training do the same, so one of them is simulated, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from outcore.errors import WhatIfError, suggest
from outcore.job import Job
from outcore.machine import Device
from outcore.whatif.clocks import SimulatedStep
from outcore.whatif.data_parallel import data_parallel, sharded
from outcore.whatif.elsewhere import record_on
from outcore.whatif.links import ClusterLink
from outcore.whatif.pipelines import PipelinePlans
from outcore.whatif.recorded_step import RecordedStep
from outcore.whatif.recording import SetupRecording
from outcore.whatif.scaling_table import STRATEGIES, WOVEN, ScalingPoint, ScalingTable
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import Technique

__all__ = ["scale_out"]


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
    waits = [p for p in points if p.strategy == "data_parallel" and p.waits]
    if waits:
        own = waits[0].batch // waits[0].gpus
        for size in (own * 2, own * 4, own * 8):
            point = _point("data_parallel", *recorded(size), waits[0].gpus, plans, one)
            if isinstance(point, ScalingPoint) and not point.waits:
                hidden_from = size
                break
    weights = sum(costs.parameters.values())
    shown = (job.name, device.name, link.name, mode)
    launch_s = single.busy_s("host") if single.bound_by == "host" else None
    return ScalingTable(*shown, tuple(points), tuple(refused), weights, largest, hidden_from, launch_s)


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
