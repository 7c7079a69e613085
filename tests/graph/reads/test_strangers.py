"""Modules that are no part of the model: what is read of them is watched, what is written to them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import VaryingError
from tests.graph.reads.test_snapshot import recorded


class Settings(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor, self.unread = factor, 0


OUTSIDE = Settings()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    OUTSIDE.__dict__.pop("extra", None)
    OUTSIDE.factor = 2.0


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.alpha = nn.Linear(3, 3), how, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "reads":
            return self.layer(x) * OUTSIDE.factor + hasattr(OUTSIDE, "extra")
        if self.how == "writes":
            OUTSIDE.factor = 3.0
        if self.how == "makes":
            made = Settings(4.0)
            made.factor = made.factor + 1.0
            return self.layer(x) * made.factor * OUTSIDE.factor
        return self.layer(x) * self.__dict__["alpha"]


@pytest.mark.parametrize(("name", "value"), [("factor", 3.0), ("extra", True)])
def test_what_is_read_of_another_module_is_noticed_when_it_changes(name: str, value: Any) -> None:
    net, x = Net("reads"), torch.randn(2, 3)
    module, reads = recorded(net, x)
    OUTSIDE.unread += 1
    assert reads.holds()
    setattr(OUTSIDE, name, value)
    assert not reads.holds() and f"self.{name} of Settings" in list(reads.changed())
    assert torch.equal(module(x), net(x))


def test_what_is_written_to_another_module_is_refused() -> None:
    module, _ = recorded(Net("writes"), x := torch.randn(2, 3))
    with pytest.raises(VaryingError, match=r"forward changes self\.factor of Settings"):
        module(x)


def test_a_module_that_forward_makes_depends_on_nothing_outside() -> None:
    net, x = Net("makes"), torch.randn(2, 3)
    module, reads = recorded(net, x)
    for _ in range(3):
        assert torch.equal(module(x), net(x))
    assert reads.holds() and [len(of) for of in module.recordings.values()] == [1]
    OUTSIDE.factor = 3.0
    assert not reads.holds() and torch.equal(module(x), net(x))


def test_a_look_at_all_attributes_reads_each() -> None:
    net, x = Net("looks at all"), torch.randn(2, 3)
    module, reads = recorded(net, x)
    net.alpha = 0.25
    assert not reads.holds() and "self.alpha of Net" in list(reads.changed())
    assert torch.equal(module(x), net(x))
