"""What torchrun's launcher starts in tests."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import outcore
from outcore.run.ranks.world import World
from tests.run.resuming import BY_STAGES, make
from tests.run.training import batches_of, train
from tests.run.varying import PIPE


def train_two() -> Any:
    torch.set_num_threads(1)
    return train("unet", PIPE)["losses"]


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


def train_given(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two steps of a model that was made elsewhere, on two ranks that each hold all of it."""
    torch.set_num_threads(1)
    graph = outcore.capture(model, (inputs[:2],))
    plan = outcore.Plan(graph.fingerprint, (("0",), ("1", "2")), schedule="gems", batches=2)
    engine = outcore.Engine(model, plan, loss=mse_loss, optimizer=_descent, example=inputs, device="cpu")
    for _ in range(2):
        engine.step(inputs, targets)
    return {name: value.clone() for name, value in engine.state_dict().items()}


def _descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)
