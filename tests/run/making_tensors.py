"""Networks whose forward makes tensors without naming a device, as people who train on a CPU write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.run import Engine


class Making(nn.Module):
    """A causal mask, positions, constants from Python's numbers, and zeros that are written into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + torch.arange(length)[:, None] * torch.tensor([0.01])
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        shifted = torch.zeros(x.shape, dtype=x.dtype)
        shifted[:, 1:] = x[:, :-1]
        return self.head(x + shifted * torch.tensor(0.5))  # type: ignore[no-any-return]


class Named(Making):
    """The same, on a device that it names; and with a number that it looks at."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.head.weight.mean().item()
        return super().forward(tokens) * (2.0 if weight > 0 else 1.0)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def job(kind: type[Making] = Making) -> outcore.Job:
    return outcore.Job(
        model=lambda: kind().double(),
        batch=lambda n: (torch.randint(20, (n, 6)), torch.randint(20, (n, 6))),
        loss=_loss,
        size=8,
        name=kind.__name__,
    )


def steps(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randint(20, (8, 6)), torch.randint(20, (8, 6))) for _ in range(count)]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(schedule: Any) -> dict[str, Tensor]:
    """The weights of this rank after some steps."""
    made = job()
    engine = Engine(made, outcore.plan(made, devices=2, memory="1GiB", schedule=schedule), optimizer=momentum)
    assert len(engine.plan.stages) == 2
    for inputs, targets in steps():
        engine.step(inputs, targets)
    weights = {name: p.detach().clone() for name, p in engine.parameters.items()}
    engine.close()
    return weights


def refused() -> str:
    """What ranks say to a network that looks at numbers."""
    graph = job(Named).build()
    plan = outcore.Plan(outcore.capture(graph, (steps(1)[0][0],)).fingerprint, (("embedding",), ("layers", "head")))
    try:
        Engine(job(Named), plan, optimizer=momentum).close()
    except outcore.OutcoreError as error:
        return str(error)
    return ""
