"""Figures of a run as they come: two CSV files, and other loggers if asked for.

One row for each step and one for each epoch. A run that continues after an interruption first drops the rows behind its
checkpoint, so the files of an interrupted run are those of one that was not. A full disk is reported once, and counted;
training goes on without these figures rather than stop for them. Another logger that fails is left out from then on,
and a run that continues takes up the one it had there.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from outcore.errors import ConfigError
from outcore.train.run_folder.folder import RunFolder, replace
from outcore.train.settings.config import Config

__all__ = ["CsvTable", "Journal"]

STEPS = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "time_s", "examples_per_s", "memory_bytes")


class JournalSink(Protocol):
    """Another logger."""

    name: str

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""

    def close(self) -> None:
        """Close the logger at the end of the run."""


class CsvTable:
    """A CSV file that grows by rows."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        self.lost = 0
        """Rows that could not be written."""

    def keep(self, key: str, below: int) -> None:
        """Drop the rows whose key is not below a number, and those that a kill has cut short."""
        if not self.path.exists():
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if _is_whole(row) and row.get(key, "").isdigit()]
        rows = [row for row in rows if int(row[key]) < below]
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, self.columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        replace(self.path, out.getvalue())

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        try:
            fresh = not self.path.exists()
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self.columns, lineterminator="\n")
                if fresh:
                    writer.writeheader()
                writer.writerow({name: _shown(row.get(name)) for name in self.columns})
        except OSError as error:
            if not self.lost:
                print(f"warning: {self.path}: {error.strerror}; training goes on without this log", file=sys.stderr)
            self.lost += 1


class Journal:
    """All loggers of a run."""

    def __init__(self, folder: RunFolder, config: Config, figures: Sequence[str]) -> None:
        self.steps = CsvTable(folder.steps, STEPS)
        self.epochs = CsvTable(folder.epochs, ("epoch", "step", "loss", *figures, "learning_rate", "time_s"))
        self._every = config.log.every_steps
        self._sinks = _sinks(folder, config)

    def resume(self, *, step: int, epoch: int) -> None:
        """Drop what came after a checkpoint."""
        self.steps.keep("step", step)
        self.epochs.keep("epoch", epoch)

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Log the figures of a step."""
        if row["step"] % self._every == 0:
            self.steps.add(row)
            self._pass_on(row["step"], row, ("loss", "learning_rate", "examples_per_s", "memory_bytes"), "")

    def add_epoch(self, row: Mapping[str, Any]) -> None:
        """Log the figures of an epoch."""
        self.epochs.add(row)
        self._pass_on(row["step"], row, [c for c in self.epochs.columns if c not in ("epoch", "step")], "epoch/")

    def close(self) -> None:
        """Close all loggers."""
        for sink in self._sinks:
            sink.close()

    def _pass_on(self, step: int, row: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
        figures = {prefix + name: float(row[name]) for name in names if isinstance(row.get(name), (int, float))}
        for sink in list(self._sinks):
            try:
                sink.add(step, figures)
            except Exception as error:  # a server that is gone must not end a training run
                self._sinks.remove(sink)
                said = str(error).partition("\n")[0] or type(error).__name__
                print(f"warning: {sink.name}: {said}; training goes on without it", file=sys.stderr)


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """The run has ended."""
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, project: str, folder: RunFolder, config: Config) -> None:
        import wandb

        before = folder.read_facts().get("wandb")
        self._run = wandb.init(
            project=project,
            dir=str(folder.path),
            name=folder.path.name,
            config=config.to_dict(),
            id=before,
            resume="allow" if before else None,
        )
        folder.note(wandb=self._run.id)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """The run has ended."""
        self._run.finish()


class _Mlflow:
    name = "MLflow"

    def __init__(self, experiment: str, folder: RunFolder) -> None:
        import mlflow

        mlflow.set_experiment(experiment)
        before = folder.read_facts().get("mlflow")
        run = mlflow.start_run(run_id=before, run_name=folder.path.name)
        folder.note(mlflow=run.info.run_id)
        self._mlflow = mlflow

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        """The run has ended."""
        self._mlflow.end_run()


def _sinks(folder: RunFolder, config: Config) -> list[JournalSink]:
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb, "mlflow": config.log.mlflow}
    for name, asked in wanted.items():
        if asked and importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.{name} was asked for and {name} is not installed; type: pip install {name}")
    made: dict[str, Callable[[], JournalSink]] = {
        "tensorboard": lambda: _TensorBoard(folder.path / "tensorboard"),
        "wandb": lambda: _Wandb(str(config.log.wandb), folder, config),
        "mlflow": lambda: _Mlflow(str(config.log.mlflow), folder),
    }
    return [_started(name, made[name]) for name, asked in wanted.items() if asked]


def _started(name: str, make: Callable[[], JournalSink]) -> JournalSink:
    try:
        return make()
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"log.{name} was asked for, and {name} does not start: {said}") from error


def _is_whole(row: Mapping[Any, Any]) -> bool:
    """Whether a row has all its columns, and no more."""
    return None not in row and None not in row.values()


def _shown(value: Any) -> Any:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else value
