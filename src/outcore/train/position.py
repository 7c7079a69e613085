"""The position of a run: the loop's own state, as numbers that go into a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from outcore.documents.schema import Maybe, Number, Record, Whole, check
from outcore.errors import CheckpointError
from outcore.train.metrics import HIGHER_IS_BETTER

__all__ = ["TrainingPosition"]

_COUNT = Whole(least=0)
_SCHEMA = Record(
    {"epoch": _COUNT, "step_in_epoch": _COUNT, "step": _COUNT},
    {
        "examples": _COUNT,
        "loss_sum": Number(),
        "loss_examples": _COUNT,
        "best": Maybe(Number()),
        "best_epoch": Maybe(_COUNT),
        "not_finite": _COUNT,
        "epoch_time_s": Number(least=0),
    },
    open=True,
)


@dataclass
class TrainingPosition:
    """Steps and epochs done, and the best so far."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    """Over all epochs."""
    examples: int = 0
    loss_sum: float = 0.0
    """The sum of losses in this epoch, over examples."""
    loss_examples: int = 0
    best: float | None = None
    best_epoch: int | None = None
    not_finite: int = 0
    """Steps whose loss or gradients were not finite."""
    epoch_time_s: float = 0.0

    def add(self, loss: float, examples: int, time_s: float) -> None:
        """Count a step."""
        self.step += 1
        self.step_in_epoch += 1
        self.examples += examples
        self.epoch_time_s += time_s
        if math.isfinite(loss):
            self.loss_sum += loss * examples
            self.loss_examples += examples

    def leave_out(self) -> None:
        """Count a step without any example to train on."""
        self.step += 1
        self.step_in_epoch += 1

    @property
    def mean_loss(self) -> float:
        """Of this epoch so far."""
        return self.loss_sum / self.loss_examples if self.loss_examples else float("nan")

    def end_epoch(self) -> None:
        """Begin the next."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.loss_sum, self.loss_examples, self.epoch_time_s = 0.0, 0, 0.0

    def note_validation(self, name: str, value: float) -> bool:
        """Whether a validation figure is the best so far; remembered if it is."""
        if not math.isfinite(value):
            return False
        higher = name in HIGHER_IS_BETTER
        if self.best is not None and not (value > self.best if higher else value < self.best):
            return False
        self.best, self.best_epoch = value, self.epoch
        return True

    def stale(self, patience: int | None) -> bool:
        """Whether the last improvement is too many finished epochs ago."""
        return patience is not None and self.best_epoch is not None and self.epoch - 1 - self.best_epoch >= patience

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Any, source: str = "the position of a run") -> TrainingPosition:
        """From plain values; names that are not known are left out."""
        check(given, _SCHEMA, source, CheckpointError)
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
