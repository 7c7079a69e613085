"""Where examples come from, independent of the runner: a table or folder, the job's data set or batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outcore.data import DamagedTile, SlideTable
from outcore.data.table import BadSlide
from outcore.errors import ConfigError, TrainError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine.units import counted
from outcore.train.examples.examples import OwnExamples, SlideExamples, find_tables
from outcore.train.examples.feed import Feed, JobFeed, MicroBatch
from outcore.train.run_folder.folder import RunFolder
from outcore.train.settings.config import Config

__all__ = ["ExampleSupply", "find_supply", "with_batch"]


@dataclass(frozen=True)
class ExampleSupply:
    """Where examples come from, independent of the runner."""

    train: Any
    validation: Any
    examples: int
    batch: int

    def feeds(
        self,
        config: Config,
        job: Job,
        *,
        lazy: bool = True,
        replica: tuple[int, int] = (0, 1),
        whole_steps: bool = False,
    ) -> tuple[Feed | JobFeed, Feed | JobFeed | None]:
        """Batches for a runner."""
        settings = config.train
        if self.train is None:
            steps = settings.steps or 1
            made = JobFeed(job, self.batch, settings.accumulate, steps, settings.seed, replica)
            return made, None
        common = {"batch": self.batch, "lazy": lazy, "mean": config.data.mean, "std": config.data.std}
        feed = Feed(
            self.train,
            accumulate=settings.accumulate,
            seed=settings.seed,
            replica=replica,
            whole_steps=whole_steps,
            limit=settings.steps,
            **common,  # type: ignore[arg-type]
        )
        if self.validation is None:
            return feed, None
        # Every replica validates on all of it, with as many at a time as it trains on: slides may differ in size.
        common["batch"] = max(1, self.batch // replica[1])
        return feed, Feed(self.validation, training=False, **common)  # type: ignore[arg-type]

    def largest(self, config: Config, job: Job) -> MicroBatch:
        """The micro-batch of the largest images, still lazy: what is planned for it has room for every other."""
        feed, _ = self.feeds(config, job)
        if isinstance(feed, JobFeed):
            return next(feed.epoch(0))[0]
        made = feed.largest()
        if made is None:
            raise TrainError("none of the examples can be read: " + "; ".join(map(str, self.bad)))
        return made

    def check_labels(self, graph: Graph | None) -> None:
        """Raise for class numbers that the network has no output for, before training fails on one."""
        if graph is None or len(graph.outputs) != 1:
            return
        shape = graph.values[graph.outputs[0]].shape
        if len(shape) != 2 or shape[1] < 2:
            return
        for examples in (self.train, self.validation):
            rows = examples.table.rows if isinstance(examples, SlideExamples) else ()
            for row in rows:
                if isinstance(row.label, int) and row.label >= shape[1] and row.mask is None:
                    where = f"{examples.table.name}, line {row.number} ({row.path})"
                    raise TrainError(
                        f"{where}: label {row.label}; the network has {shape[1]} outputs, for labels 0 to "
                        f"{shape[1] - 1}; correct the table or the network"
                    )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its figures should know: slides that are trained on and validated on."""
        tables = [e.table for e in (self.train, self.validation) if isinstance(e, SlideExamples)]
        if len(tables) < 2 or tables[0] is tables[1]:
            return ()
        trained, validated = ({row.path.resolve() for row in table.rows} for table in tables)
        both = len(trained & validated)
        said = f"{both} of the {counted(len(validated), 'slide')} of the validation {'is' if both == 1 else 'are'}"
        return (f"{said} trained on too: its figures say little about new slides",) if both else ()

    @property
    def bad(self) -> list[BadSlide]:
        """Slides that were skipped, of training and validation."""
        return [bad for table in self._tables for bad in table.bad]

    @property
    def damage(self) -> list[DamagedTile]:
        """Tiles that were read as glass."""
        return [tile for table in self._tables for tile in table.damage]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, where the training table has words for them."""
        return next((table.classes for table in self._tables), ())

    @property
    def _tables(self) -> list[SlideTable]:
        examples = [e for e in (self.train, self.validation) if isinstance(e, SlideExamples)]
        return list({id(e.table): e.table for e in examples}.values())


def with_batch(config: Config, job: Job, folder: RunFolder, ranks: int) -> Config:
    """The settings with the batch of a step, where several ranks share it and its size was not given.

    A batch that is smaller than the number of ranks cannot be shared, so every rank gets an example. A run that
    continues has the batch it began with, on however many ranks.
    """
    if config.train.batch is not None or config.plan.file is not None:
        return config
    if folder.begun and folder.config.exists():
        return replace(config, train=replace(config.train, batch=Config.load(folder.config).train.batch))
    own = 1 if config.data.train is not None else job.size
    return replace(config, train=replace(config.train, batch=ranks)) if own < ranks else config


def find_supply(config: Config, job: Job) -> ExampleSupply:
    """Examples as the settings and the job name them."""
    batch = config.train.batch or job.size
    if config.data.train is not None:
        train_examples, validation = find_tables(config.data, config.train.seed)
        return ExampleSupply(train_examples, validation, len(train_examples), config.train.batch or 1)
    if job.dataset is not None:
        own = OwnExamples(job.dataset("train"), "dataset('train')")
        held = job.dataset("validation")
        checked = None if held is None else OwnExamples(held, "dataset('validation')")
        return ExampleSupply(own, checked, len(own), batch)
    if config.train.steps is None:
        raise ConfigError(
            f"{job.name} makes its own batches; say how many steps an epoch has: train.steps=100, or --data"
        )
    return ExampleSupply(None, None, 0, batch)
