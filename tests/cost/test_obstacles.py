"""What cannot be made again in backward, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outcore
from outcore.cost.buffers import Buffer, buffers_of
from outcore.cost.measured.saved_bytes import account


class Doubled(torch.autograd.Function):
    """A function of the user's own, about which nothing is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Network(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.first, self.last = run, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.bounded = nn.Embedding(5, 8), nn.Embedding(5, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def buffers(run: Callable[[Any, Tensor], Tensor], x: Tensor) -> dict[str, Buffer]:
    graph = outcore.capture(Network(run), (x,))
    return buffers_of(graph, account(graph))


def overwritten(network: Any, x: Tensor) -> Tensor:
    read = network.first(x)
    made = torch.exp(read)
    read.add_(1)
    return network.last(made) + read


@pytest.mark.parametrize(
    ("run", "buffer", "why"),
    [
        (lambda n, x: n.last(Doubled.apply(n.first(x))), "Doubled()#0:out", "Doubled is not known to give"),
        (overwritten, "exp()#0:out", "add_()#0 overwrites first#0:out, which exp()#0 has read"),
        (overwritten, "first#0:out", ""),
        (overwritten, "x", "an input"),
        (lambda n, x: n.last(F.dropout(n.first(x))), "dropout()#0~0", "made for backward"),
        (lambda n, x: n.last(torch.exp(n.first(x))), "exp()#0:out", ""),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_of_making_a_buffer_again(run: Any, buffer: str, why: str) -> None:
    found = buffers(run, torch.randn(6, 8))[buffer].obstacle
    assert found.startswith(why) if why else not found


@pytest.mark.parametrize(
    ("run", "writes"),
    [
        (lambda n, x: n.last(n.bounded(x)), True),
        (lambda n, x: n.last(n.table(x)), False),
        (lambda n, x: n.last(F.embedding(x, n.table.weight, None, 1.0)), True),
        (lambda n, x: n.last(F.embedding(x, n.table.weight, max_norm=1.0)), True),
        (lambda n, x: n.last(F.embedding(x, n.table.weight, 0, None)), False),
        (lambda n, x: n.last(F.embedding(x, n.table.weight)), False),
    ],
)
def test_an_embedding_that_shortens_its_rows_does_not_run_twice(run: Any, writes: bool) -> None:
    read = [b for name, b in buffers(run, torch.tensor([0, 3, 3])).items() if name not in ("x", "last#0:out")]
    assert [b.obstacle.endswith("writes into its weight") for b in read] == [writes]
    assert writes or not read[0].obstacle
