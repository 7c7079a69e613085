"""From a forecast to a runner: plain where it fits, within the budget or in tiles where not, many ranks by a plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import torch

from outcore.data import Batch
from outcore.errors import OutcoreError, PlanError, TrainError
from outcore.job import Job
from outcore.machine import known
from outcore.machine.units import parse_budget
from outcore.planner.pipeline.batch_norm_images import norms_see, own_norms
from outcore.program.plan.document import Plan
from outcore.run.engine.setup import choose_device
from outcore.run.ranks.world import World, identify
from outcore.spatial.choose import plan as make_plan
from outcore.train.examples.feed import MicroBatch
from outcore.train.run_folder.folder import RunFolder
from outcore.train.runners.engine_runner import EngineRunner, finite_only
from outcore.train.runners.fitting import fit, refit
from outcore.train.runners.replica_runner import ReplicaRunner
from outcore.train.runners.runner import PlainRunner
from outcore.train.runners.step_loss import default_loss
from outcore.train.settings.config import PRECISIONS, Config
from outcore.train.settings.schedules import make_optimizer
from outcore.train.start import RunForecast, device_here, forecast

__all__ = ["build_runner"]

TIMEOUT_S = 300.0
"""After which a silent rank ends the run."""


def build_runner(
    config: Config, job: Job, expected: RunForecast, first: MicroBatch, folder: RunFolder, *, apart: bool = False
) -> tuple[PlainRunner | EngineRunner, RunForecast]:
    """The runner that executes the steps, and the forecast with what was decided.

    Args:
        config: the settings.
        job: what is trained.
        expected: what was predicted.
        first: the first micro-batch, for its shape.
        folder: of the run.
        apart: whether every rank has an example of its own, of whatever size; `first` is then one of them.
    """
    if apart:
        return _replicas(config, job, expected, first, folder, World.join(timeout_s=TIMEOUT_S))
    staged = config.plan.file is not None and Plan.load(config.plan.file).stream is None
    if identify(os.environ) is not None or staged:
        return _engine(config, job, expected, first, folder)
    return _plain(config, job, expected, first, folder)


def _plain(
    config: Config, job: Job, expected: RunForecast, first: MicroBatch, folder: RunFolder
) -> tuple[PlainRunner, RunForecast]:
    torch.manual_seed(config.train.seed)
    device = device_here(config.train.device)[0]
    model = job.build().to(device).train()
    made = fit(model, job, config, expected, first, folder)
    runner = PlainRunner(
        made.model,
        make_optimizer(config.optimizer, job),
        loss=job.loss or default_loss,
        device=device,
        precision=config.train.precision,
        clip=config.train.clip,
        skip_nan=config.train.on_nan == "skip",
        lazy=made.lazy,
        accumulate=config.train.accumulate,
        refit=refit(model, job, config, expected, first),
    )
    return runner, made.added(expected)


def _engine(
    config: Config, job: Job, expected: RunForecast, first: MicroBatch, folder: RunFolder
) -> tuple[PlainRunner | EngineRunner, RunForecast]:
    from outcore.run import Engine

    world = World.join(timeout_s=TIMEOUT_S)
    plan = _agreed(config, expected, world)
    if plan is None:
        one = _one_share(first, world.size)
        return _replicas(config, job, forecast(job, one.inputs, config, one.targets), one, folder, world)
    if world.rank == 0:
        plan.save(folder.plan)
    settings = config.train
    engine = Engine(
        job,
        plan,
        loss=job.loss or default_loss,
        optimizer=make_optimizer(config.optimizer, job),
        example=_meta_inputs(first.inputs),
        clip_norm=settings.clip,
        autocast=PRECISIONS.get(settings.precision),
        loss_scale=finite_only() if settings.on_nan == "skip" and settings.precision != "fp16" else None,
        accumulate=settings.accumulate,
        seed=settings.seed,
        device=settings.device,
        timeout_s=TIMEOUT_S,
    )
    predicted = plan.predicted
    decided = ("plan", f"{plan.arrangement}, on {world.size} ranks")
    seen = norms_see(plan, expected.graph) if expected.graph is not None and world.size > 1 else None
    divided = plan.batch_norm != "synchronised" and plan.replicas * plan.micro_batches > 1
    if seen is not None and divided and expected.graph is not None and not own_norms(expected.graph):
        seen += "; plan.batch_norm=synchronised lets them see all"
    expected = replace(expected, decisions=(decided, *([("batch norms", seen)] if seen else [])))
    if predicted is not None:
        expected = replace(expected, planned_step_s=predicted.time_s, planned_peak_bytes=max(predicted.peak_bytes))
    return EngineRunner(engine, world, config.key), expected


def _replicas(
    config: Config, job: Job, expected: RunForecast, first: MicroBatch, folder: RunFolder, world: World
) -> tuple[PlainRunner, RunForecast]:
    """The whole network on every rank, each on its own share, within the budget or in tiles as on one rank."""
    if config.data.on_bad == "skip":
        raise TrainError("data.on_bad=skip cannot be had where every rank reads its own slides; use data.on_bad=raise")
    torch.manual_seed(config.train.seed)
    device = str(choose_device(config.train.device, world.local_rank))
    model = job.build().to(device).train()
    try:
        made = fit(model, job, config, expected, first, folder)
    except OutcoreError:
        if world.rank:  # one message is enough
            raise SystemExit(1) from None
        raise
    runner = ReplicaRunner(
        world,
        made.model,
        make_optimizer(config.optimizer, job),
        loss=job.loss or default_loss,
        device=device,
        precision=config.train.precision,
        clip=config.train.clip,
        skip_nan=config.train.on_nan == "skip",
        lazy=made.lazy,
        accumulate=config.train.accumulate,
        seed=config.train.seed,
    )
    expected = made.added(expected)
    said = ("plan", f"data parallel, {world.size} replicas, each with examples of its own")
    return runner, replace(expected, decisions=(said, *expected.decisions))


def _one_share(first: MicroBatch, ranks: int) -> MicroBatch:
    """What one rank gets of a micro-batch."""
    share = max(1, first.examples // ranks)

    def cut(inputs: Any) -> Any:
        if isinstance(inputs, Batch):
            return replace(inputs, sources=inputs.sources[:share])
        if isinstance(inputs, (tuple, list)):
            return tuple(cut(x) for x in inputs)
        if isinstance(inputs, dict):
            return {name: cut(x) for name, x in inputs.items()}
        return inputs[:share] if isinstance(inputs, torch.Tensor) else inputs

    return replace(
        first, inputs=cut(first.inputs), targets=cut(first.targets), names=first.names[:share], rows=first.rows[:share]
    )


def _agreed(config: Config, expected: RunForecast, world: World) -> Plan | None:
    """The plan of the first rank, on all; None where every rank is to run the whole network within the budget.

    Where there is neither the others leave silently: one message is enough.
    """
    refused: OutcoreError | None = None
    said: Any = None
    if world.rank == 0:
        try:
            said = _plan(config, expected, world.size).to_json()
        except PlanError as error:
            # Stages do not meet the budget; policies and tiles on every rank may.
            said, refused = ("apart", None) if _may_run_apart(config, expected, world.size) else (None, error)
        except OutcoreError as error:
            refused = error
    found = world.share(said)[0]
    if refused is not None:
        raise refused
    if found is None:
        raise SystemExit(1)
    return None if found == "apart" else Plan.from_json(found)


def _may_run_apart(config: Config, expected: RunForecast, ranks: int) -> bool:
    """Whether each rank can have examples of its own, and no stages were asked for."""
    asked = config.plan.file is not None or config.plan.schedule is not None
    samples = expected.shapes[0][0] if expected.shapes and expected.shapes[0] else 0
    return not asked and config.plan.memory is not None and samples >= ranks and samples % ranks == 0


def _plan(config: Config, expected: RunForecast, ranks: int) -> Plan:
    """The plan that was given, or one made here."""
    if config.plan.file is not None:
        return Plan.load(config.plan.file)
    graph = expected.graph
    if graph is None:
        raise TrainError(f"{ranks} ranks need a plan, and {'; '.join(expected.notes)}; write one by hand: plan.file=…")
    if ranks == 1:
        return Plan(graph.fingerprint, (("",),))
    return make_plan(
        graph,
        devices=ranks,
        memory=parse_budget(config.plan.memory, expected.peak_bytes) if config.plan.memory else None,
        machine=known(),
        schedule=cast("Any", config.plan.schedule),
        batch_norm=config.plan.batch_norm,
        beside=expected.beside,
    )


def _meta_inputs(inputs: Any) -> Any:
    """Meta tensors of the shape of a batch."""
    if isinstance(inputs, (tuple, list)):
        return tuple(_meta_inputs(x) for x in inputs)
    if isinstance(inputs, dict):
        return {name: _meta_inputs(x) for name, x in inputs.items()}
    return torch.empty(tuple(inputs.shape), dtype=inputs.dtype, device="meta") if hasattr(inputs, "shape") else inputs
