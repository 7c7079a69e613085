"""The order of examples, and batches of them, made ahead of the step that needs them.

A step takes `accumulate` micro-batches. The order of an epoch is a permutation drawn from the seed and the epoch's
number, so step *n* of epoch *e* always has the same examples, whether the run was interrupted or not; each
data-parallel replica takes its own rows of every micro-batch. One thread reads and decodes the next step while this one
computes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outcore.data import ArraySource, Batch, DataError, Source
from outcore.graph.structure import leaves
from outcore.job import Job
from outcore.memory.offload.worker_threads import read_ahead
from outcore.run.engine import batch as batches
from outcore.train.examples.examples import Examples, generator

__all__ = ["Feed", "JobFeed", "MicroBatch", "Steps", "tensors_of"]


@dataclass(frozen=True)
class MicroBatch:
    """What the network is given at once; inputs are a lazy batch where the feed is lazy."""

    inputs: Any
    targets: Any
    names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Numbers of the examples, where they have any."""

    @property
    def examples(self) -> int:
        """How many."""
        return len(self.names)


def tensors_of(given: Any) -> list[Tensor]:
    """The tensors that a step is given as they are; what is read lazily is not among them."""
    return [leaf for _, leaf in leaves(given, (Tensor, Batch)) if isinstance(leaf, Tensor)]


Steps = Generator[list[MicroBatch], None, None]
"""Close it when it is left early: a thread reads ahead."""


@dataclass(frozen=True)
class Feed:
    """Batches of numbered examples.

    Args:
        examples: what to draw from.
        batch: examples of a micro-batch, over all replicas.
        accumulate: micro-batches of a step.
        seed: of the order.
        training: whether to shuffle and to crop at random.
        lazy: whether slides stay sources, for streaming, or are read whole.
        replica: which share of every micro-batch, of how many.
        whole_steps: leave out a last step that is not full.
    """

    examples: Examples
    batch: int = 1
    accumulate: int = 1
    seed: int = 0
    training: bool = True
    lazy: bool = False
    replica: tuple[int, int] = (0, 1)
    whole_steps: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    limit: int | None = None

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        full, rest = divmod(len(self.examples), self.batch * self.accumulate)
        steps = full + (1 if rest and not self.whole_steps else 0)
        return steps if self.limit is None else min(steps, self.limit)

    def epoch(self, number: int, start: int = 0) -> Steps:
        """The steps of an epoch, from one of them on."""
        order = self._order(number)
        size = self.batch * self.accumulate
        chunks = [order[i * size : (i + 1) * size] for i in range(start, self.steps)]
        if not chunks:
            return
        for _, ready in read_ahead(chunks, lambda chunk: self._step(chunk, number), 1):
            yield ready

    def unreadable(self, micro_batches: Sequence[MicroBatch], error: DataError) -> None:
        """Note what a runner that reads for itself could not read; raises unless bad examples are skipped."""
        every = [(row, name) for m in micro_batches for row, name in zip(m.rows, m.names, strict=True)]
        named = [row for row, name in every if name in str(error)]
        for row in named or [row for row, _ in every]:
            self.examples.skip(row, error)

    def first(self) -> MicroBatch | None:
        """The first micro-batch that can be made; None if no example can be read."""
        return self._first_of(self._micro_batches())

    def largest(self) -> MicroBatch | None:
        """The micro-batch of the largest images, whose plan has room for every other; None if none can be read.

        Where sizes are not known before an example is read, the first.
        """
        return self._first_of(sorted(self._micro_batches(), key=lambda rows: -max(map(self.examples.pixels, rows))))

    def mean_size(self) -> float:
        """The mean size of an image, as a share of the largest; 1 where sizes are not known."""
        pixels = [self.examples.pixels(row) for row in range(len(self.examples))]
        return sum(pixels) / (len(pixels) * max(pixels)) if any(pixels) else 1.0

    def _micro_batches(self) -> list[list[int]]:
        order = self._order(0)
        return [order[i : i + self.batch] for i in range(0, len(order), self.batch)]

    def _first_of(self, chunks: Sequence[Sequence[int]]) -> MicroBatch | None:
        return next(filter(None, (self._micro_batch(chunk, 0) for chunk in chunks)), None)

    def _order(self, epoch: int) -> list[int]:
        if not self.training:
            return list(range(len(self.examples)))
        order: list[int] = torch.randperm(
            len(self.examples), generator=generator(self.seed, epoch, -2), device="cpu"
        ).tolist()
        return order

    def _step(self, chosen: Sequence[int], epoch: int) -> list[MicroBatch]:
        made = []
        mine, all_of_them = self.replica
        for first in range(0, len(chosen), self.batch):
            rows = chosen[first : first + self.batch]
            share = rows[mine * len(rows) // all_of_them : (mine + 1) * len(rows) // all_of_them]
            if (micro_batch := self._micro_batch(share, epoch)) is not None:
                made.append(micro_batch)
        return made

    def _micro_batch(self, rows: Sequence[int], epoch: int) -> MicroBatch | None:
        inputs, targets, names, kept = [], [], [], []
        for index in rows:
            try:
                image, target = self.examples.load(index, epoch, training=self.training)
                if isinstance(image, Source) and not self.lazy:
                    # Read now: a damaged file is this example's fault, not the batch's.
                    image = image.read([(0, n) for n in image.shape])
            except DataError as error:
                self.examples.skip(index, error)
                continue
            inputs.append(image)
            targets.append(target)
            names.append(self.examples.name(index))
            kept.append(index)
        if not inputs:
            return None
        return MicroBatch(self._joined(inputs, names), _stacked(targets, names), tuple(names), tuple(kept))

    def _joined(self, inputs: list[Any], names: list[str]) -> Any:
        if not all(isinstance(image, (Tensor, Source)) for image in inputs):
            return torch.utils.data.default_collate(inputs)
        try:
            sources = tuple(i if isinstance(i, Source) else ArraySource(i) for i in inputs)
            batch = Batch(sources, mean=self.mean, std=self.std)
        except DataError as error:
            raise DataError(f"{', '.join(names)}: {error}") from None
        if not sources[0].dtype.is_floating_point and sources[0].dtype not in (torch.uint8, torch.uint16):
            return torch.stack([i if isinstance(i, Tensor) else i.read([(0, n) for n in i.shape]) for i in inputs])
        return batch if self.lazy else batch.tensor()


@dataclass(frozen=True)
class JobFeed:
    """Batches that the job makes itself; each from a seed of its own, so any of them can be made again.

    Every replica makes the whole batch and takes its own rows, so that a step trains on the same samples on any number
    of ranks.
    """

    job: Job
    batch: int
    accumulate: int
    steps: int
    seed: int = 0
    replica: tuple[int, int] = (0, 1)

    def epoch(self, number: int, start: int = 0) -> Steps:
        """The steps of an epoch, from one of them on."""
        for step in range(start, self.steps):
            yield [self._made(number, step * self.accumulate + i) for i in range(self.accumulate)]

    def unreadable(self, micro_batches: Sequence[MicroBatch], error: DataError) -> None:
        """What a job makes itself is not skipped."""
        raise error

    def _made(self, epoch: int, number: int) -> MicroBatch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(self.seed, epoch, number, 0).initial_seed())
            made = self.job.made_batch(self.batch)
        mine, all_of_them = self.replica
        if all_of_them > 1:
            count = batches.rows(made[0])
            made = batches.cut(made, count, batches.parts(count, all_of_them))[mine]
        return MicroBatch(*made, tuple(f"batch {number}" for _ in range(batches.rows(made[0]))))


def _stacked(targets: list[Any], names: list[str]) -> Any:
    if not all(isinstance(target, Tensor) for target in targets):
        return torch.utils.data.default_collate(targets)
    shapes = {tuple(target.shape) for target in targets}
    if len(shapes) > 1:
        raise DataError(f"{', '.join(names)}: targets of shapes {sorted(shapes)} make no batch; use --batch 1")
    return torch.stack(targets)
