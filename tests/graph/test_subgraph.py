"""A part of a network is a module with the names, the numbers and the state of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import OutcoreError
from outcore.graph.subgraph import Subgraph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("mean", torch.rand(4))
        self.register_buffer("table", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) - self.mean) * self.scale * self.table)


def halves() -> tuple[Net, Subgraph, Subgraph]:
    net = Net()
    graph = outcore.capture(net, (torch.rand(3, 4),))
    _, recording = graph._running()
    names = list(graph.calls)
    first, last = (Subgraph(graph, net, recording, set(part)) for part in (names[:-1], names[-1:]))
    return net, first, last


def test_halves_run_one_after_the_other_as_the_whole() -> None:
    net, first, last = halves()
    x = torch.rand(3, 4)
    assert torch.equal(last(first({first.inputs[0]: x}))[last.outputs[0]], net(x))
    with pytest.raises(OutcoreError, match="missing inputs"):
        first({})
    with pytest.raises(OutcoreError, match=r"has shape \(2, 4\), but the graph was captured with \(3, 4\)"):
        first({first.inputs[0]: torch.rand(2, 4)})


def test_state_has_its_own_name_and_what_is_not_saved_stays_so() -> None:
    net, first, last = halves()
    assert first.scale is net.scale and first.table is net.table and last.last is net.last
    assert set(first.state_dict()) == {"first.weight", "first.bias", "scale", "mean"}
    assert set(first.state_dict()) | set(last.state_dict()) == set(net.state_dict())


class Many(nn.Module):
    """Tensors that calls take one by one, as modules of one's own do."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(24):
            self.register_buffer(f"shift_{number * 7 % 24}", torch.rand(4))
            self.register_parameter(f"scale_{number * 5 % 24}", nn.Parameter(torch.rand(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(24):
            x = x * getattr(self, f"scale_{number}") + getattr(self, f"shift_{number}")
        return x


def test_tensors_are_in_the_order_of_the_calls_in_every_process() -> None:
    """They were in the order of a set of their names, so that two ranks sent each other different ones."""
    net = Many()
    graph = outcore.capture(net, (torch.rand(3, 4),))
    part = Subgraph(graph, net, graph._running()[1], set(graph.calls))
    assert [name for name, _ in part.named_buffers()] == [f"shift_{number}" for number in range(24)]
    assert [name for name, _ in part.named_parameters()] == [f"scale_{number}" for number in range(24)]
