"""Making one device's step fit: plain where it does, policies for saved tensors where they suffice, tiles where not.

The order is that of what it costs the user: a plain step needs nothing; the memory engine gives the same bits; tiles
give the same sums in another order, and need nothing of the image in memory at all. Which of them it is, is decided by
`outcore.stream.one_device`, as `outcore plan` decides it, and the figures that are said are those. The memory engine
then plans once more, with what it measures on the device; should that refuse, tiles are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outcore.data import Batch
from outcore.errors import CaptureError, OutcoreError, PlanError, StreamError, TrainError
from outcore.graph.structure import substitute
from outcore.job import Job
from outcore.machine.units import format_bytes, parse_budget, rounded_up
from outcore.planner.memory.plan import MemoryPlan
from outcore.program.plan.document import Plan
from outcore.program.policies import kind_of_policy
from outcore.run.engine.batch import arguments
from outcore.stream.one_device import OneDeviceStep
from outcore.stream.plan.step_document import StreamedStep
from outcore.train.examples.feed import MicroBatch
from outcore.train.run_folder.folder import RunFolder
from outcore.train.runners.step_loss import StepLoss
from outcore.train.settings.config import Config, computing
from outcore.train.start import RunForecast, device_here

__all__ = ["FittedModel", "fit", "refit"]

_MORE_ROOM = 0.85
"""Share of a budget that a second plan may use, after the first ran out of memory."""


@dataclass(frozen=True)
class FittedModel:
    """A model that fits, and what was decided for it."""

    model: nn.Module
    lazy: bool = False
    """Whether it reads lazy inputs region by region."""
    decisions: tuple[tuple[str, str], ...] = ()
    step_s: float | None = None
    peak_bytes: int | None = None
    plan: Plan | None = None
    """The tiles, where there are any: a run that goes on takes them again."""

    def deciding(self, *first: tuple[str, str]) -> FittedModel:
        """The same, with what was decided before."""
        return replace(self, decisions=(*first, *self.decisions))

    def added(self, expected: RunForecast) -> RunForecast:
        """The forecast with what was decided."""
        return replace(
            expected, decisions=self.decisions, planned_step_s=self.step_s, planned_peak_bytes=self.peak_bytes
        )


def fit(
    model: nn.Module, job: Job, config: Config, expected: RunForecast, first: MicroBatch, folder: RunFolder
) -> FittedModel:
    """Fit a model on its device into the budget; without one, into the device as it is.

    Args:
        model: on its device.
        job: what is trained.
        config: the settings.
        expected: the forecast of a plain step.
        first: what a step is given.
        folder: of the run, where tiles are kept.
    """
    budget = parse_budget(config.plan.memory, expected.peak_bytes) if config.plan.memory else None
    if config.plan.file is not None:
        return _by_plan(model, Plan.load(config.plan.file))
    if config.plan.tile is not None:
        return _tiled(model, config.plan.tile)
    if budget is None:
        return FittedModel(model)
    on_cpu = device_here(config.train.device)[0] == "cpu"
    counts = (("memory", "live tensors are counted; the process takes more"),) if on_cpu else ()
    allowed = ("budget", format_bytes(budget) + _share_of_plain(config.plan.memory))
    loss = StepLoss.of(model, job, first, expected)
    before = Plan.load(folder.plan) if folder.plan.exists() else None
    if before is not None and before.stream is not None and before.memory_bytes == budget:
        if expected.graph is not None and before.graph == expected.graph.fingerprint:
            return _by_plan(model, before).deciding(*counts, allowed)
    made = _within_or_streamed(model, job, config, expected, first, budget, loss)
    if made.plan is not None:
        made.plan.save(folder.plan)
    if not made.decisions:
        assert made.peak_bytes is not None
        said = f"{allowed[1]}, enough for a plain step, which needs {format_bytes(made.peak_bytes)} with its loss"
        return made.deciding(*counts, ("budget", said))
    return made.deciding(*counts, allowed)


def refit(
    model: nn.Module, job: Job, config: Config, expected: RunForecast, first: MicroBatch
) -> Callable[[], tuple[FittedModel, str] | None]:
    """Plan again for a smaller budget, after memory ran out."""

    def again() -> tuple[FittedModel, str] | None:
        memory = config.plan.memory
        allowed = parse_budget(memory, expected.peak_bytes) if memory else expected.capacity_bytes
        if allowed is None:
            return None
        budget = int(allowed * _MORE_ROOM)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            own = _released(model)
            loss = StepLoss.of(own, job, first, expected)
            made = _within_or_streamed(own, job, config, expected, first, budget, loss)
        except OutcoreError:
            return None
        return made, f"planned again for {format_bytes(budget)}: {'; '.join(text for _, text in made.decisions)}"

    return again


def _within_or_streamed(
    model: nn.Module,
    job: Job,
    config: Config,
    expected: RunForecast,
    first: MicroBatch,
    budget: int,
    loss: StepLoss,
) -> FittedModel:
    from outcore.train.runners.tiling import choose_step, plan_stream

    beside = loss.bytes if expected.loss_bytes is None else expected.loss_bytes
    # Only the memory of the step with its loss says that a plain step is enough.
    plain = expected.peak_bytes if expected.loss_bytes is not None else None
    refused, enough, passes = [], [] if plain is None else [plain], ""
    try:
        step = choose_step(model, job, config, expected, budget, beside, first.inputs)
        if step.rung == "plain":
            return FittedModel(model, step_s=step.time_s, peak_bytes=step.peak_bytes)
        if isinstance(step.plan, MemoryPlan):
            try:
                return _within(model, job, config, first.inputs, budget, loss, step, step.plan)
            except (PlanError, CaptureError) as error:
                least = getattr(error, "least_bytes", None)
                enough += [] if least is None else [least + loss.target_bytes]
                refused.append(_why(error, plain))
        found = step.plan if isinstance(step.plan, StreamedStep) else None
        return _by_plan(model, plan_stream(model, job, config, expected, first.inputs, budget, beside, found))
    except (PlanError, StreamError, CaptureError) as error:
        least = getattr(error, "least_bytes", None)
        enough += [] if least is None else [least]
        passes = getattr(error, "further_passes", "") if least is not None else ""  # else the reason says it
        refused.append(_why(error, plain))
    needs = "?" if expected.peak_bytes is None else format_bytes(expected.peak_bytes)
    if not enough and expected.peak_bytes is not None:
        enough.append(expected.peak_bytes + loss.bytes)
    give = f"; give --memory {rounded_up(min(enough))} or more" if enough else ""
    give += f", or plan.statistics=true, {passes}" if passes else ""
    raise TrainError(f"a plain step needs {needs}, the budget is {format_bytes(budget)}; {'; '.join(refused)}{give}")


def _why(error: OutcoreError, plain: int | None) -> str:
    """Why something does not fit, without what a command has no option for."""
    least = getattr(error, "least_bytes", None)
    if least is None:
        return str(error).splitlines()[0]
    if plain is not None and least >= plain:
        return "policies and tiles need no less"
    return f"policies and tiles need at least {format_bytes(least)}"


def _within(
    model: nn.Module,
    job: Job,
    config: Config,
    inputs: Any,
    budget: int,
    loss: StepLoss,
    step: OneDeviceStep,
    plan: MemoryPlan,
) -> FittedModel:
    """The model under policies, which are chosen again from what is measured here."""
    from outcore.one_device.within import within
    from outcore.train.settings.schedules import make_optimizer

    optimizer = make_optimizer(config.optimizer, job)
    device = torch.device(device_here(config.train.device)[0]).type
    args, kwargs = _example(inputs, device)
    left = max(1, budget - loss.target_bytes)
    with computing(config.train.precision, device):
        within(model, args, kwargs, memory=left, loss=loss, optimizer=optimizer, stream=False, quiet=True)
    kinds: dict[str, int] = {}
    for how in plan.policy.values():
        kind = kind_of_policy(how)
        kinds[kind] = kinds.get(kind, 0) + 1
    done = {"recompute": "recomputed", "offload": "offloaded", "encode": "encoded"}
    shown = ", ".join(f"{count} {done.get(kind, kind)}" for kind, count in kinds.items()) or "all kept"
    said = f"{format_bytes(step.peak_bytes)} at {plan.slowdown:.2f}x the time of a plain step; saved values: {shown}"
    return FittedModel(model, False, (("within", said),), step.time_s, step.peak_bytes)


def _example(inputs: Any, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is planned for: images by their shape, and as they are what has names or is not of real numbers."""
    args, kwargs = arguments(inputs)

    def on_device(x: Any) -> Any:
        return substitute(x, torch.Tensor, lambda t: t.to(device))

    def real(x: Any) -> bool:
        return isinstance(x, Batch) or (isinstance(x, torch.Tensor) and x.is_floating_point())

    named = {name: on_device(x.tensor() if isinstance(x, Batch) else x) for name, x in kwargs.items()}
    return tuple(tuple(x.shape) if real(x) else on_device(x) for x in args), named


def _by_plan(model: nn.Module, plan: Plan) -> FittedModel:
    """The model streamed by the tiles of a plan."""
    from outcore.train.runners.tiling import apply_tiles

    expected = plan.predicted
    said = plan.why[0] if plan.why else "by the plan that was given"
    return FittedModel(
        apply_tiles(model, plan),
        True,
        (("streamed", said),),
        None if expected is None else expected.time_s,
        None if expected is None else max(expected.peak_bytes),
        plan,
    )


def _tiled(model: nn.Module, tile: int) -> FittedModel:
    from outcore.stream import stream
    from outcore.train.runners.tiling import arranged, readers

    said = f"the early part of the network in tiles of {tile} pixels"
    return FittedModel(stream(arranged(model), tile=tile, workers=readers(model)), True, (("streamed", said),))


def _share_of_plain(memory: str | None) -> str:
    """What a share is a share of, in words; nothing for a size."""
    share = (memory or "").strip()
    return f", {share} of a plain step's" if share.endswith("%") else ""


def _released(model: nn.Module) -> nn.Module:
    """The model as the user made it."""
    from outcore.one_device.within import release

    inner: nn.Module = getattr(model, "model", model) if type(model).__name__ == "Streamed" else model
    return release(inner)
