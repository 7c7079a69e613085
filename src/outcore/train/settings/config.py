"""All settings of a training run: sections of named values, from a YAML file and from dotted words.

    job: job.py                    outcore train run.yaml plan.memory=20GiB train.epochs=10
    data: {train: slides.csv}
    plan: {memory: 24GiB}

Every setting has a name, a type and a default here and nowhere else; a name or value that does not fit is refused with
the nearest that does. The resolved settings are written beside the run, which can be repeated from that file alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from outcore.documents.reading import read_yaml
from outcore.documents.schema import Anything, MapOf, check
from outcore.errors import ConfigError, suggest
from outcore.machine.units import parse_budget
from outcore.train.metrics import METRICS
from outcore.train.settings.dataclasses import copied, flatten, make, override, plain

__all__ = [
    "PRECISIONS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LogConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ScheduleConfig",
    "TrainConfig",
    "computing",
]


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from and how an image becomes an input."""

    train: str | None = None
    """A table of slides, or a folder with one folder of images for each class; none for the job's own batches."""
    validation: float | str | None = None
    """Another table or folder, or the share of the training data to set aside."""
    level: int = 0
    """Level of the file: 0 is the finest."""
    microns_per_pixel: float | None = None
    """Resolution, resampled from the nearest finer level; replaces the level."""
    crop: int | None = None
    """Side of a random square to train on; the whole image otherwise."""
    resize: int | None = None
    """Side of the square that ordinary images are resized to."""
    mean: tuple[float, ...] = ()
    """Subtracted from every channel, of values between 0 and 1."""
    std: tuple[float, ...] = ()
    """What every channel is divided by afterwards."""
    classes: tuple[str, ...] = ()
    """Names of the classes in their order; alphabetical when not given."""
    on_bad: Literal["raise", "skip"] = "raise"
    """Whether a slide that cannot be read ends the run, or is left out and listed in ``bad.csv``."""
    on_damage: Literal["raise", "white"] = "raise"
    """Whether a damaged tile makes its slide a bad one, or is read as glass and counted."""


@dataclass(frozen=True)
class PlanConfig:
    """How much memory there is, and over how many ranks."""

    memory: str | None = None
    """The most that a device may hold at any moment, like ``20GiB``, or ``50%`` of a plain step; none for no bound."""
    ranks: int = 1
    """Processes to train with."""
    file: str | None = None
    """A plan written before, by `outcore plan -o` or by hand."""
    schedule: str | None = None
    """Only plans of this schedule (model_parallel, gpipe, 1f1b, gems); the fastest when not given."""
    batch_norm: Literal["micro_batch", "deferred", "synchronised"] | None = None
    """What batch norms see on several ranks: a micro-batch (statistics move with each, or once), or all images."""
    tile: int | None = None
    """Side of the tiles in which the early part of the network runs; chosen by the budget when not given."""
    statistics: bool = False
    """Accept further passes over an image for norms that look at all of it."""


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in; fp32 needs none."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    epochs: int = 1
    """Passes over the training data."""
    steps: int | None = None
    """Steps of an epoch; needed where the job makes its own batches, else all of the data."""
    batch: int | None = None
    """Examples of a batch; when not given the job's own size, 1 for slides, and at least one for each rank."""
    accumulate: int = 1
    """Batches whose gradients are added up for a step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What autocast computes in; fp16 scales its loss."""
    clip: float | None = None
    """Largest norm of all gradients together."""
    seed: int = 0
    """Of the weights, the order and crops of the data, and everything drawn while training."""
    deterministic: bool = False
    """Only operations that give the same bits every time, where torch has them."""
    device: str | None = None
    """cpu or cuda; a GPU when not given and there is one."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Whether a loss or gradient that is not finite ends the run, or its step is left out and counted."""
    patience: int | None = None
    """Epochs without a better validation after which to stop."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of torch by name; when no name is given the job's own, or AdamW."""

    name: str | None = None
    """A class of ``torch.optim``."""
    lr: float | None = None
    """Learning rate; overrides the job's own too."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its other arguments."""


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule of torch by name."""

    name: str | None = None
    """A class of ``torch.optim.lr_scheduler``."""
    every: Literal["epoch", "step"] = "epoch"
    """When it moves."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments; the length of the run is filled in where it is asked for."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, besides at the end of every epoch and on a signal."""

    every_steps: int | None = None
    """Also after so many steps."""
    allow_changes: bool = False
    """Go on from a checkpoint of another experiment: other settings, network, loss, classes or data."""


@dataclass(frozen=True)
class LogConfig:
    """Where figures go, besides ``steps.csv`` and ``epochs.csv``."""

    tensorboard: bool = False
    """Write events into the run's folder."""
    wandb: str | None = None
    """Name of a project."""
    mlflow: str | None = None
    """Name of an experiment."""
    every_steps: int = 1
    """Steps between two rows."""


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    >>> Config.read({"job": "job.py"}, ["plan.memory=8GiB", "train.epochs=3"]).train.epochs
    3
    """

    job: str = ""
    input: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: tuple[str, ...] = ()
    key: str | None = None
    """Which output the metrics look at, of a model that returns several: its name or number."""
    watch: str = "loss"
    """The validation figure that decides which epoch is best."""
    out: str = "runs/latest"
    resume: str = "auto"
    """``auto`` goes on where a run in the same folder stopped; ``never`` refuses to; else a checkpoint."""

    def __post_init__(self) -> None:
        at_least_one = (
            ("train.epochs", self.train.epochs),
            ("train.steps", self.train.steps),
            ("train.batch", self.train.batch),
            ("train.accumulate", self.train.accumulate),
            ("train.patience", self.train.patience),
            ("plan.ranks", self.plan.ranks),
            ("checkpoint.every_steps", self.checkpoint.every_steps),
            ("log.every_steps", self.log.every_steps),
        )
        for name, value in at_least_one:
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} was given; it is 1 or more")
        if self.plan.memory is not None:
            parse_budget(self.plan.memory, 1)
        self._refuse_harm()
        if isinstance(self.data.validation, float) and not 0 < self.data.validation < 1:
            raise ConfigError(f"data.validation={self.data.validation} was given; a share lies between 0 and 1")

    def _refuse_harm(self) -> None:
        """Raise for values that would silently train nothing, or away from the goal."""
        above_zero = (
            ("train.clip", self.train.clip, "the largest norm of the gradients; leave it out for no bound"),
            ("data.microns_per_pixel", self.data.microns_per_pixel, "a resolution"),
            ("data.crop", self.data.crop, "the side of a square in pixels"),
            ("data.resize", self.data.resize, "the side of a square in pixels"),
            ("plan.tile", self.plan.tile, "the side of a tile in pixels"),
            *(("data.std", value, "what a channel is divided by") for value in self.data.std),
        )
        for name, value, what in above_zero:
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value} was given; it is {what}, and must be a number above 0")
        if self.optimizer.lr is not None and not (math.isfinite(self.optimizer.lr) and self.optimizer.lr >= 0):
            raise ConfigError(f"optimizer.lr={self.optimizer.lr} was given; a learning rate is a number of at least 0")
        if self.data.level < 0:
            raise ConfigError(f"data.level={self.data.level} was given; levels are numbered from 0, the finest")
        if not -(2**63) <= self.train.seed < 2**63:
            raise ConfigError(f"train.seed={self.train.seed} was given; it must fit into 64 bits")
        if self.watch not in ("loss", *METRICS):
            raise ConfigError(f"watch={self.watch} is no figure; {suggest(self.watch, ['loss', *METRICS])}")

    @classmethod
    def read(cls, given: Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
        """From nested mappings, then ``section.name=value`` words that override them."""
        merged = copied(given)
        for word in overrides:
            override(merged, word)
        made = make(cls, merged, "")
        assert isinstance(made, cls)
        return made

    @classmethod
    def load(cls, path: Path, overrides: Iterable[str] = ()) -> Config:
        """From a YAML file; a job named in it is looked for beside it."""
        given = read_yaml(path, Anything(), ConfigError)
        if not isinstance(given, dict):
            raise ConfigError(f"{path} holds {type(given).__name__}; it must hold settings, like  job: job.py")
        given = copied(check(given, MapOf(), path, ConfigError))
        _beside(given, path.parent)
        return cls.read(given, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as plain values."""
        made = plain(self)
        assert isinstance(made, dict)
        return made

    def to_yaml(self) -> str:
        """Every setting, as `load` reads it."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Settings in which two runs differ, by dotted name."""
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        return {name: (value, theirs.get(name)) for name, value in mine.items() if theirs.get(name) != value}


def computing(precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast on a kind of device, where the precision asks for it: what is recorded and planned is what will run."""
    dtype = PRECISIONS.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)


def _beside(settings: dict[str, Any], folder: Path) -> None:
    """Make the paths of a file those of its folder."""

    def moved(value: Any) -> Any:
        found = isinstance(value, str) and not Path(value).is_absolute() and (folder / value).exists()
        return str(folder / value) if found else value

    for section, names in (("", ("job",)), ("data", ("train", "validation")), ("plan", ("file",))):
        inside = settings.get(section, {}) if section else settings
        if isinstance(inside, dict):
            inside.update({name: moved(inside[name]) for name in names if name in inside})
