"""A whole run, from settings to report: what `outcore train` calls.

    settings ─▶ job, data ─▶ forecast, plan ─▶ runner ─▶ loop ─▶ report

Returns an exit code: 0 for a run that is done (also if it was done before), 128 plus the signal for one that was asked
to stop and can go on, 1 for one that could not.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from rich.console import Console
from torch import nn

from outcore.documents.folders import missing_folders, remove_empty
from outcore.errors import CheckpointError, ConfigError, OutcoreError, PlanError, TrainError
from outcore.job import Job
from outcore.machine.units import parse_budget
from outcore.program.plan.document import Plan
from outcore.run.checkpoint.restore import has_checkpoint
from outcore.run.ranks.parent_death import end_with_parent, launcher_pid, started_by_torchrun
from outcore.run.ranks.rendezvous import say_that_it_failed
from outcore.run.ranks.world import identify
from outcore.train.examples.feed import Feed, JobFeed, MicroBatch
from outcore.train.examples.supply import ExampleSupply, find_supply, with_batch
from outcore.train.launch import launch
from outcore.train.loop import Loop
from outcore.train.metrics import default_metrics, make_metrics
from outcore.train.progress import make_show
from outcore.train.run_folder.closing import say_ending, write_beginning, write_ending
from outcore.train.run_folder.experiment import describe
from outcore.train.run_folder.folder import RunFolder
from outcore.train.run_folder.journal import Journal
from outcore.train.run_folder.owner import owning
from outcore.train.runners.build import TIMEOUT_S, build_runner
from outcore.train.runners.step_loss import default_loss
from outcore.train.scored_output import check_asked, chosen, output_shapes
from outcore.train.settings.config import Config
from outcore.train.settings.schedules import find_schedule, make_schedule
from outcore.train.start import forecast, start_table
from outcore.train.stop_signals import StopRequest, listening

__all__ = ["train"]


def train(config: Config, console: Console) -> int:
    """Run to the end, or until it is asked to stop."""
    if config.resume not in ("auto", "never") and not has_checkpoint(Path(config.resume)):
        raise CheckpointError(
            f"no good checkpoint in {config.resume}, which --resume names; give the folder of one, like "
            "runs/first/checkpoints/last"
        )
    _check_names(config)
    if config.plan.ranks > 1 and identify(os.environ) is None:
        return _launch(config, console)
    stop_request, parent = StopRequest(), launcher_pid()
    with listening(stop_request, prints=first_rank()), _telling_others():
        if parent is not None:
            end_with_parent(parent)()
        elif started_by_torchrun():
            end_with_parent(os.getppid())()
        return _train(config, console, stop_request)


@contextlib.contextmanager
def _telling_others() -> Iterator[None]:
    """What fails on this rank before it has met the others is told to them; they would wait for it."""
    try:
        yield
    except Exception as error:
        if (identity := identify(os.environ)) is not None:
            say_that_it_failed(identity, error, TIMEOUT_S)
        raise


def _check_names(config: Config) -> None:
    """Refuse what cannot be measured, scheduled or followed as a plan, before anything is read, planned or written."""
    find_schedule(config.schedule)
    make_metrics(config.metrics)
    if config.metrics and config.watch not in ("loss", *config.metrics):
        _refuse_watch(config.watch, config.metrics)
    if (folder := Path(config.out)).exists() and not folder.is_dir():
        raise TrainError(f"{folder}, where the run would go, is a file; say another --out")
    if (file := config.plan.file) is not None:
        if not Path(file).is_file():
            devices = max(2, config.plan.ranks)
            raise PlanError(f"no file {file}; make one with: outcore plan {config.job} --devices {devices} -o {file}")
        Plan.load(file)


def _refuse_watch(watch: str, metrics: tuple[str, ...]) -> NoReturn:
    measured = f"only the loss and {', '.join(metrics)}" if metrics else "only the loss"
    raise ConfigError(
        f"watch={watch} was given, and this run measures {measured}; add it to metrics=, and validation data"
    )


def _launch(config: Config, console: Console) -> int:
    """Start the ranks; errors of the job or its tables are reported once, before there are any."""
    folder = RunFolder(Path(config.out))
    job = Job.load(config.job, inputs=config.input, arguments=config.arguments)
    config = _with_batch(config, job, folder, config.plan.ranks, console)
    if config.data.train is not None:
        find_supply(config, job)
    with _leaving_no_traces(folder) as failed:
        with owning(folder.path):
            code = launch(folder.config, config.plan.ranks) if begin(folder, config, console) else 0
        if code == 1:
            failed()
        return code


def _train(config: Config, console: Console, stop_request: StopRequest) -> int:
    folder = RunFolder(Path(config.out))
    job = Job.load(config.job, inputs=config.input, arguments=config.arguments)
    identity = identify(os.environ)
    config = _with_batch(config, job, folder, identity.size if identity is not None else 1, console)
    supply = find_supply(config, job)
    _seed(config)
    with console.status("reading sizes") if first_rank() else contextlib.nullcontext():
        first, apart = _first(supply, config, job, identity.size if identity is not None else 1)
    with (
        _leaving_no_traces(folder) if first_rank() else contextlib.nullcontext(),
        owning(folder.path, beside=launcher_pid()) if first_rank() else contextlib.nullcontext(),
    ):
        if not begin(folder, config, console):
            return 0
        return _train_in(folder, config, console, stop_request, job, supply, first, apart=apart)


@contextlib.contextmanager
def _leaving_no_traces(folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Leave nothing of a run that failed before its first step, where its folder is its own.

    What failed so is a mistake in the job, its data or its settings, and was printed; gives what to call for a failure
    that is not raised.
    """

    def failed() -> None:
        if fresh:
            folder.discard()
            remove_empty(made)

    made = missing_folders(folder.path)
    fresh = not folder.path.exists() or not any(folder.path.iterdir())
    try:
        yield failed
    except BaseException:
        failed()
        raise


def _train_in(
    folder: RunFolder,
    config: Config,
    console: Console,
    stop_request: StopRequest,
    job: Job,
    supply: ExampleSupply,
    first: MicroBatch,
    *,
    apart: bool,
) -> int:
    """Train in a folder that this run owns."""
    with console.status("planning") if first_rank() else contextlib.nullcontext():
        expected = forecast(job, first.inputs, config, first.targets)
        supply.check_labels(expected.graph)
        shapes = output_shapes(expected.graph) if expected.graph is not None else {}
        runner, expected = build_runner(config, job, expected, first, folder, apart=apart)
    feed, validation = supply.feeds(
        config, job, lazy=runner.lazy, replica=runner.replica, whole_steps=runner.whole_steps
    )
    if feed.steps < 1:
        raise TrainError(f"{supply.examples} examples make no step of {supply.batch} x {config.train.accumulate}")
    size = feed.mean_size() if isinstance(feed, Feed) else 1.0
    expected = replace(expected, mean_size=size, notes=(*expected.notes, *supply.notes))
    if runner.rank == 0:
        examples = feed.steps * supply.batch * config.train.accumulate if supply.train is None else supply.examples
        console.print(start_table(config, job, expected, steps=feed.steps, examples=examples, batch=supply.batch))
        console.print()
    metrics, said = _metrics(config, shapes, first.targets, validation)
    if said and runner.rank == 0:
        console.print(f"{said}\n", highlight=False, markup=False, soft_wrap=True)
    if config.watch != "loss" and config.watch not in metrics:
        _refuse_watch(config.watch, metrics)
    assert runner.optimizer is not None
    loop = Loop(
        config,
        runner,
        feed,
        validation,
        folder,
        make_show(console, rank=runner.rank),
        Journal(folder, config, _figures(metrics, validation is not None)) if runner.rank == 0 else None,
        make_schedule(config.schedule, runner.optimizer, epochs=config.train.epochs, steps=feed.steps),
        metrics,
        parse_budget(config.plan.memory, expected.peak_bytes) if config.plan.memory else None,
        stop_request=stop_request,
        experiment=describe(expected.graph, _skeleton(job), job.loss or default_loss, first.targets, supply),
    )
    if loop.resume() and runner.rank == 0:
        where, epochs = loop.position, config.train.epochs
        said = f"going on at epoch {where.epoch + 1}, step {where.step + 1}"
        done = f"{where.epoch} epochs are done, {epochs} were asked for; for more: --epochs {where.epoch + 1}"
        console.print(done if where.epoch >= epochs else said, highlight=False)
    if runner.rank == 0:
        write_beginning(loop, expected)
        folder.note(classes=list(supply.classes))
    return _run(loop, supply, console)


def _first(supply: ExampleSupply, config: Config, job: Job, ranks: int) -> tuple[MicroBatch, bool]:
    """The largest micro-batch, and whether every rank has a slide of its own instead of a share of a batch.

    Whole slides differ in size, if not the first two then the next, and cannot be stacked.
    """
    whole = config.data.train is not None and config.data.crop is None and config.data.resize is None
    asked = config.plan.file is not None or config.plan.schedule is not None or config.data.on_bad == "skip"
    if ranks > 1 and supply.batch == ranks and whole and not asked:
        return replace(supply, batch=1).largest(config, job), True
    return supply.largest(config, job), False


def _with_batch(config: Config, job: Job, folder: RunFolder, ranks: int, console: Console) -> Config:
    """The settings with a batch that the ranks can share; printed where it was not given."""
    made = with_batch(config, job, folder, ranks)
    if made.train.batch != config.train.batch and not folder.begun and first_rank():
        said = f"a step trains on {made.train.batch} examples, one for each rank; --batch sets another number"
        console.print(said, highlight=False)
    return made


def begin(folder: RunFolder, config: Config, console: Console) -> bool:
    """Enter the folder of the run; False if there is nothing left to do in it."""
    if not first_rank():
        return True
    begun = folder.open(config)
    position = folder.read_facts().get("position") or {}
    over = folder.read_facts().get("ended") in ("finished", "stopped early")
    if begun and over and int(position.get("epoch", 0)) >= config.train.epochs:
        console.print(f"{folder.path} is finished; see {folder.report}", highlight=False)
        return False
    return True


def first_rank() -> bool:
    """Whether this process is the one that prints."""
    identity = identify(os.environ)
    return identity is None or identity.rank == 0


def _run(loop: Loop, supply: ExampleSupply, console: Console) -> int:
    """Run the loop, and record how it ended whatever happens."""
    folder, began = loop.folder, time.monotonic()
    ended = "failed"
    try:
        ending = loop.run()
        ended = "finished, not saved" if loop.unsaved else ending.how
    except BaseException as error:
        if loop.runner.rank == 0:
            with contextlib.suppress(OSError):  # a full disk must not hide the error
                folder.note(error=str(error) or type(error).__name__)
        raise
    finally:
        if loop.runner.rank == 0:
            _write_down(loop, supply, ended, time.monotonic() - began, console)
        loop.runner.close()
    if loop.runner.rank == 0:
        say_ending(loop, supply, ending, console)
    if ending.how == "interrupted":
        return 128 + (ending.signal or 0)
    return 1 if loop.unsaved else 0


def _write_down(loop: Loop, supply: ExampleSupply, ended: str, time_s: float, console: Console) -> None:
    """Record the end of a run in its folder; a full disk is reported and hides no earlier error."""
    try:
        write_ending(loop, supply, ended, time_s)
    except OSError as error:
        said = f"warning: the report could not be written: {error.strerror or error}; make room, then type: "
        console.print(f"{said}outcore report {loop.folder.path}", highlight=False, markup=False, soft_wrap=True)


def _metrics(
    config: Config, shapes: Mapping[str, tuple[int, ...]], targets: Any, validation: Feed | JobFeed | None
) -> tuple[tuple[str, ...], str]:
    """What a validation measures beside the loss; and what to say of that, where something is left out.

    Args:
        config: the settings.
        shapes: of the network's outputs, by key.
        targets: that belong to them.
        validation: what is validated on.
    """
    make_metrics(config.metrics)
    if validation is None:
        return config.metrics, ""
    check_asked(config.metrics, config.key, shapes, targets)
    if config.metrics or not isinstance(validation, Feed) or not isinstance(targets, torch.Tensor):
        return config.metrics, ""
    return chosen(default_metrics(targets), config.key, shapes, targets)


def _skeleton(job: Job) -> nn.Module | None:
    """The model without its weights, for the options of its layers; None if it cannot be made so."""
    try:
        with torch.random.fork_rng(devices=[]):
            return job.build("meta")
    except (OutcoreError, NotImplementedError):
        return None


def _figures(metrics: tuple[str, ...], validated: bool) -> list[str]:
    return ["validation_loss", *(f"validation_{name}" for name in metrics)] if validated else []


def _seed(config: Config) -> None:
    seed = config.train.seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
