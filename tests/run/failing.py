"""What ranks do in fault tests: train a network that fails where it is told to."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.run import Engine
from outcore.run.ranks import faults

HOW = {"now": "none"}
"""What happens on this rank."""


class Trouble(torch.autograd.Function):
    """A part that stays whole when it is recorded, and does what it is told when it runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        match HOW["now"]:
            case "raise":
                raise ValueError("the layer is broken")
            case "hang":
                time.sleep(120)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if HOW["now"] == "backward":
            raise ValueError("no gradient today")
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Trouble.apply(self.linear(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


JOB = outcore.Job(
    model=Net, batch=lambda n: (torch.randn(n, 4), torch.randn(n, 4)), loss=F.mse_loss, size=4, name="failing"
)
STAGES = (("a",), ("b",), ("c",))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def fail(
    how: str,
    at_rank: int,
    at_step: int,
    timeout_s: float = 200.0,
    grace_s: float = 190.0,
    silent_after_s: float | None = None,
) -> float:
    """Train three stages; at a step, a rank gets into trouble."""
    if silent_after_s is not None:
        faults.SILENT_AFTER_S = silent_after_s
    HOW["now"] = "none"
    plan = outcore.Plan(JOB.capture().fingerprint, STAGES, micro_batches=2)
    engine = Engine(JOB, plan, optimizer=sgd, timeout_s=timeout_s, grace_s=grace_s)
    torch.manual_seed(1)
    for step in range(4):
        if step == at_step and engine.rank == at_rank:
            HOW["now"] = how
            if how == "leave":
                engine.close()
                return 0.0
            if how == "between steps":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        if how == "between steps":
            assert engine.largest(engine.rank) == 2
            assert engine.share(engine.rank) == [0, 1, 2]
        loss = engine.step(*JOB.batch(4))
    engine.close()
    return loss
