"""Data for ranks: every sample once per epoch, each rank loading only what its stages read.

A step takes `batch_size` samples over all replicas. The order of an epoch is a function of seed and epoch alone; batch
b is a run of it, and each replica takes its contiguous part of the run. Ranks whose stages read neither inputs nor
targets get None and load nothing. What is left at the end of an epoch is a smaller batch; if there are fewer samples
left than replicas, they join the batch before. The position is part of checkpoints and counts batches, so a run resumes
at the next sample also on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from outcore.errors import EngineError


def cut_epoch(order: Sequence[int], batch_size: int, replicas: int) -> list[list[list[int]]]:
    """For each batch, the samples of each replica.

    >>> cut_epoch(range(9), 4, 2)
    [[[0, 1], [2, 3]], [[4, 5, 6], [7, 8]]]
    """
    runs = [list(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    if len(runs) > 1 and len(runs[-1]) < replicas:
        last = runs.pop()
        runs[-1] += last
    return [[part.tolist() for part in torch.tensor(run, device="cpu").tensor_split(replicas)] for run in runs]


class Loader:
    """Goes through a dataset, again and again; ``for inputs, targets in loader`` is one epoch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        replica: int,
        replicas: int,
        wanted: bool,
        shuffle: bool,
        seed: int,
        workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        if batch_size < replicas:
            raise EngineError(f"a batch of {batch_size} samples leaves some of {replicas} replicas without any")
        if len(dataset) < replicas:
            raise EngineError(f"{len(dataset)} samples are too few for {replicas} replicas")
        self.dataset, self.batch_size, self.replica, self.replicas = dataset, batch_size, replica, replicas
        self.wanted, self.shuffle, self.seed, self.workers, self.collate = wanted, shuffle, seed, workers, collate
        self.epoch = self.position = 0

    def order(self) -> list[int]:
        """The samples of this epoch, in order."""
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        found: list[int] = torch.randperm(count, generator=generator, device="cpu").tolist()
        return found

    def __len__(self) -> int:
        return len(cut_epoch(range(len(self.dataset)), self.batch_size, self.replicas))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        batches = [parts[self.replica] for parts in cut_epoch(self.order(), self.batch_size, self.replicas)]
        if self.wanted:
            loaded: Iterator[Any] = iter(
                DataLoader(
                    self.dataset,
                    batch_sampler=batches[self.position :],
                    num_workers=self.workers,
                    collate_fn=self.collate,
                )
            )
        else:
            loaded = iter([(None, None)] * (len(batches) - self.position))
        for batch in loaded:
            self.position += 1
            if self.position == len(batches):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def state(self) -> dict[str, int]:
        """The position of the loader in the epoch, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load(self, state: dict[str, int]) -> None:
        """Continue from a stored position."""
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
