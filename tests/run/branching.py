"""What ranks do where a parameter gets no gradient: a branch of the network that the loss does not see."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.run import Engine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropped, self.last = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        self.dropped(x)
        return self.last(x)


JOB = outcore.Job(
    model=Net, batch=lambda n: (torch.randn(n, 4), torch.randn(n, 2)), loss=F.mse_loss, size=4, name="branching"
)


def decaying(params: Any) -> torch.optim.Optimizer:
    """It moves whatever has a gradient, be it zero."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(count)]


def train(replicas: int, steps: int) -> dict[str, torch.Tensor]:
    """The weights after some steps, each replica with its part of the batch."""
    plan = outcore.Plan(JOB.capture().fingerprint, (("first", "dropped", "last"),), replicas=replicas)
    engine = Engine(JOB, plan, optimizer=decaying)
    for inputs, targets in batches(steps):
        engine.step(*(t.tensor_split(replicas)[engine.replica] for t in (inputs, targets)))
    weights = {n: t.clone() for n, t in engine.state_dict().items()}
    engine.close()
    return weights
