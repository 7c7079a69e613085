"""The training loop: epochs of steps, a validation after each, checkpoints, and the handling of errors.

Nothing here knows how a step is executed (`Runner`), where examples come from (`Feed`) or where figures are shown
(`ProgressDisplay`, `Journal`). The loop's own state is a `TrainingPosition`, saved with every checkpoint, so that a run
that continues after an interruption does bitwise what it would have done without one.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from outcore.errors import CheckpointError, DataError, TrainError
from outcore.program import Timeline, trace
from outcore.run.checkpoint.restore import has_checkpoint
from outcore.train.examples.feed import Feed, JobFeed, MicroBatch
from outcore.train.metrics import make_metrics
from outcore.train.position import TrainingPosition
from outcore.train.progress import ProgressDisplay
from outcore.train.run_folder.experiment import changes
from outcore.train.run_folder.folder import RunFolder, replace
from outcore.train.run_folder.journal import Journal
from outcore.train.run_folder.predictions import Predictions
from outcore.train.runners.runner import Runner, StepOutcome
from outcore.train.scored_output import pick, unfit
from outcore.train.settings.config import Config
from outcore.train.stop_signals import StopRequest

__all__ = ["Loop", "RunEnd"]

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts what a process holds."""

HowEnded = Literal["finished", "stopped early", "interrupted"]


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    how: HowEnded
    signal: int | None = None


@dataclass
class Loop:
    """One run; `run` goes from where `position` stands to the end."""

    config: Config
    runner: Runner
    feed: Feed | JobFeed
    validation: Feed | JobFeed | None
    folder: RunFolder
    show: ProgressDisplay
    journal: Journal | None
    """None on all ranks but the first."""
    schedule: lr_scheduler.LRScheduler | None = None
    metrics: tuple[str, ...] = ()
    budget_bytes: int | None = None
    position: TrainingPosition = field(default_factory=TrainingPosition)
    stop_request: StopRequest = field(default_factory=StopRequest)
    experiment: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of what is trained on what, saved with every checkpoint."""
    checkpoints_lost: int = 0
    unsaved: bool = False
    """Whether the last checkpoint could not be written."""
    timeline: Timeline | None = None
    """Of the last step of the last epoch."""
    _times: list[float] = field(default_factory=list)
    _examples: int = 0
    """Of the steps made in this process."""
    _predictions: Predictions = field(default_factory=Predictions)
    """Of the last validation."""
    _relieved: bool = False
    _peak_bytes: int | None = None
    """The most that a step of this process held, where it was counted."""
    _bookkeeping_s: float = 0.0
    """Seconds for logs, the progress bar and checks, over all steps."""

    def resume(self) -> bool:
        """Continue from the last checkpoint, or the one that was named; False if there is none."""
        named = Path(self.config.resume) if self.config.resume not in ("auto", "never") else None
        # One rank decides for all: a file system need not show everybody the same at once.
        begun = bool(self.runner.agree(int(has_checkpoint(self.folder.last))))
        source = self.folder.last if begun else named
        if source is None:
            if self.folder.last.exists() or self.folder.steps.exists():
                self.show.say("the run in this folder came to no checkpoint; it begins again from the start")
            if self.journal is not None:
                self.journal.resume(step=0, epoch=0)
            return False
        state = self.runner.load(source)
        self.position = TrainingPosition.from_json(state.get("position"), f"the position in {source}")
        if (before := state.get("experiment")) and (found := changes(before, self.experiment)):
            said = f"{source} is of another experiment: {'; '.join(found)}"
            if not self.config.checkpoint.allow_changes:
                raise TrainError(
                    f"{said}; say another --out to begin anew, or go on all the same with checkpoint.allow_changes=true"
                )
            self.show.say(f"warning: {said}; going on as told")
        if self.schedule is not None and state.get("schedule"):
            self.schedule.load_state_dict(state["schedule"])
        if self.journal is not None:
            self.journal.resume(step=self.position.step, epoch=self.position.epoch)
        return True

    def run(self) -> RunEnd:
        """Train until the last epoch, an early stop, or a signal."""
        where = self.position
        self.show.begin(self.config.train.epochs, self.feed.steps, where.step)
        try:
            while where.epoch < self.config.train.epochs:
                if not self._epoch():
                    self.save()
                    return RunEnd("interrupted", self.stop_request.signal)
                if where.stale(self.config.train.patience):
                    return RunEnd("stopped early")
        finally:
            self.show.end()
            if self.journal is not None:
                self.journal.close()
        return RunEnd("finished")

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint; a full disk is reported and counted, and the last good one is kept."""
        schedule = None if self.schedule is None else _plain_state(self.schedule.state_dict())
        state = {"position": self.position.to_json(), "schedule": schedule, "experiment": self.experiment}
        try:
            self.runner.save(self.folder.best if best else self.folder.last, state, keep=1 if best else 2)
            self.unsaved = False
        except (CheckpointError, OSError) as error:
            self.checkpoints_lost += 1
            self.unsaved = not best
            self.show.say(f"warning: no checkpoint at step {self.position.step}: {error}")

    def measured(self) -> dict[str, Any]:
        """Figures of the steps made in this process, the first left out: it prepares what later ones reuse."""
        times = sorted(self._times[1:] or self._times)
        return {
            "steps": len(self._times),
            "first_step_s": self._times[0] if self._times else None,
            "step_s": times[len(times) // 2] if times else None,
            "examples_per_s": self._examples / len(self._times) / times[len(times) // 2] if times else None,
            "peak_bytes": self._peak_bytes,
            "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
            "bookkeeping_s": self._bookkeeping_s / max(1, len(self._times)),
        }

    def _epoch(self) -> bool:
        """The rest of an epoch; False if a signal came in between."""
        where, every = self.position, self.config.checkpoint.every_steps
        with contextlib.closing(self.feed.epoch(where.epoch, where.step_in_epoch)) as steps:
            for micro_batches in steps:
                try:
                    self._step(micro_batches)
                except DataError as error:  # found while the slide was streamed
                    self.feed.unreadable(micro_batches, error)
                    where.leave_out()
                if self._asked():
                    return False
                if every is not None and where.step % every == 0 and where.step_in_epoch < self.feed.steps:
                    self.save()
        self._end_epoch()
        return not self._asked() or where.epoch >= self.config.train.epochs

    def _asked(self) -> bool:
        """Whether any rank was asked to stop; all ranks learn it at the same step."""
        found = self.runner.agree(self.stop_request.signal or 0)
        if found:
            self.stop_request.signal = found
        return bool(found)

    def _step(self, micro_batches: list[MicroBatch]) -> None:
        where, began = self.position, time.perf_counter()
        if not micro_batches:  # every example of the step was bad and is listed
            where.leave_out()
            return
        outcome = self._attempt(micro_batches)
        time_s = time.perf_counter() - began
        if self.schedule is not None and self.config.schedule.every == "step" and outcome.updated:
            self.schedule.step()
        examples = sum(m.examples for m in micro_batches) * self.runner.replica[1]
        held = self.runner.peak_bytes()
        if held is not None:
            self._peak_bytes = max(held, self._peak_bytes or 0)
        row = {
            "step": where.step,
            "epoch": where.epoch,
            "loss": outcome.loss,
            "learning_rate": self._learning_rate(),
            "gradient_norm": outcome.gradient_norm,
            "time_s": time_s,
            "examples_per_s": examples / time_s,
            "memory_bytes": held,
            "budget_bytes": self.budget_bytes,
        }
        if not outcome.updated or not math.isfinite(outcome.loss):
            self._not_finite(outcome, micro_batches)
        where.add(outcome.loss, examples, time_s)
        self._examples += examples
        self._times.append(time_s)
        if self.journal is not None:
            self.journal.add_step(row)
        self.show.step(row)
        self._bookkeeping_s += time.perf_counter() - began - time_s

    def _attempt(self, micro_batches: list[MicroBatch]) -> StepOutcome:
        """Make a step; where memory runs out, once in a run, replan with more memory left free and try again."""
        while True:
            try:
                return self.runner.step(micro_batches)
            except torch.OutOfMemoryError as error:
                first_line = str(error).splitlines()[0]
            said = None if self._relieved else self.runner.replan()
            if said is None:
                names = ", ".join(micro_batches[0].names[:3])
                raise TrainError(
                    f"out of memory in step {self.position.step + 1} ({names}): {first_line}; give a budget below the "
                    "device's memory with --memory, a smaller --batch, or train.precision=bf16"
                )
            self._relieved = True
            self.show.say(f"warning: out of memory in step {self.position.step + 1}; {said}")

    def _not_finite(self, outcome: StepOutcome, micro_batches: list[MicroBatch]) -> None:
        """Handle a loss or gradient that is not finite: skip the step and count it, or stop and say where."""
        where = self.position
        where.not_finite += 1
        names = ", ".join(dict.fromkeys(name for m in micro_batches for name in m.names[:3]))
        said = f"the loss of step {where.step + 1} is {outcome.loss} ({names})"
        if self.config.train.precision == "fp16" and math.isfinite(outcome.loss):
            return  # the loss scale was too large, and has learned it
        if self.config.train.on_nan == "skip":
            self.show.say(f"warning: {said}; the weights were left alone ({where.not_finite} so far)")
            return
        advice = "try a smaller optimizer.lr, train.clip=1 or train.on_nan=skip"
        raise TrainError(f"{said}; {advice}{self._saved_before()}")

    def _saved_before(self) -> str:
        """That something is saved, where it is."""
        return "; the last checkpoint is from before it" if has_checkpoint(self.folder.last) else ""

    def _end_epoch(self) -> None:
        """Validate, record, and save."""
        where = self.position
        if where.not_finite and where.examples and not where.loss_examples:
            raise TrainError(
                f"no step of epoch {where.epoch + 1} had a finite loss, so nothing was learned in it; look at the loss "
                f"and the data, or try a smaller optimizer.lr{self._saved_before()}"
            )
        if self._times:
            self.timeline = self.runner.timeline() or self.timeline  # before the validation's own passes
        row: dict[str, Any] = {
            "epoch": where.epoch,
            "step": where.step,
            "loss": where.mean_loss,
            "learning_rate": self._learning_rate(),
            "time_s": where.epoch_time_s,
        }
        # Only the first rank has the outputs; what follows is decided from its figures, on all ranks alike.
        figures = self.runner.broadcast(self._validate())
        row |= figures
        if self.schedule is not None and self.config.schedule.every == "epoch":
            self._advance(figures)
        watched = figures.get(f"validation_{self.config.watch}", row["loss"] if self.config.watch == "loss" else None)
        better = watched is not None and where.note_validation(self.config.watch, watched)
        where.end_epoch()
        if self.journal is not None:
            self.journal.add_epoch(row)
            self._write_trace()
        shown = "  ".join(
            f"{name.removeprefix('validation_')} {'undefined' if math.isnan(value) else f'{value:.4g}'}"
            for name, value in figures.items()
        )
        said = f"epoch {where.epoch}: loss {row['loss']:.4g}"
        self.show.say(said + (f"  validation: {shown}{'  (best)' if better else ''}" if figures else ""))
        if better:
            self.save(best=True)
            if self.journal is not None:
                self._write_predictions()
        self.save()

    def _write_trace(self) -> None:
        """Write the step that was recorded last, for whoever watches; a full disk ends no run."""
        with contextlib.suppress(OSError):
            if self.timeline is not None:
                replace(self.folder.path / "trace.json", json.dumps(trace(self.timeline), ensure_ascii=False))

    def _write_predictions(self) -> None:
        """Write the table of the best epoch; a full disk ends no run."""
        try:
            self._predictions.write(self.folder.predictions)
        except OSError as error:
            self.show.say(f"warning: {self.folder.predictions}: {error.strerror}; training goes on without it")

    def _validate(self) -> dict[str, float]:
        if self.validation is None:
            return {}
        metrics, self._predictions = make_metrics(self.metrics), Predictions()
        total, examples = 0.0, 0
        with contextlib.closing(self.validation.epoch(0)) as steps:
            for micro_batch in (m for micro_batches in steps for m in micro_batches):
                loss, made = self.runner.evaluate(micro_batch)
                output, targets = pick(made, self.config.key), micro_batch.targets
                total += loss * micro_batch.examples
                examples += micro_batch.examples
                if isinstance(output, Tensor) and isinstance(targets, Tensor):
                    self._predictions.add(micro_batch.names, output, targets)
                    for name, metric in metrics.items():
                        if not unfit(name, output.shape, targets.shape):
                            metric.add(output.float().cpu(), targets.cpu())
        found = {"validation_loss": total / examples if examples else float("nan")}
        return found | {f"validation_{name}": metric.value() for name, metric in metrics.items()}

    def _advance(self, figures: Mapping[str, float]) -> None:
        assert self.schedule is not None
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(figures.get(f"validation_{self.config.watch}", self.position.mean_loss))
        else:
            self.schedule.step()

    def _learning_rate(self) -> float | None:
        optimizer = self.runner.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state without what JSON cannot hold; functions come from the settings again."""
    return {k: v for k, v in state.items() if isinstance(v, (int, float, str, bool, list, type(None)))}
