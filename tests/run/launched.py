"""What torchrun's launcher starts in tests."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch

from outcore.run.ranks.world import World
from tests.run.resuming import BY_STAGES, make
from tests.run.training import batches_of, train
from tests.run.varying import PIPE


def train_two() -> Any:
    torch.set_num_threads(1)
    return train("unet", PIPE)["losses"]


def add_one(numbers: torch.Tensor) -> torch.Tensor:
    """Add one in place."""
    return numbers.add_(1)


def once_more(path: str, kill: bool) -> Any:
    """Train four steps with a checkpoint each; rank 1 is killed in the third, the first time."""
    torch.set_num_threads(1)
    engine = make("unet", BY_STAGES[2], timeout_s=20.0)
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if again:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a third checkpoint may have been begun
            engine.load(path)
    assert engine.steps == (2 if again else 0)
    for inputs, targets in batches_of("unet", 4, 8)[engine.steps :]:
        if kill and engine.rank == 1 and engine.steps == 2 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(inputs, targets)
        engine.save(path)
    weights = {n: t.clone() for n, t in engine.state_dict().items()}
    engine.close()
    return weights


def stopped_before_joining() -> None:
    """Rank 1 is stopped before the others can know of it."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    World.join(timeout_s=300.0)
