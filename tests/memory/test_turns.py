"""Large lots that turn round book their second half after the lot that is needed first."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from outcore.memory import parcels, traffic
from outcore.memory.lanes import Ends, Mark, ThreadLanes, Turn
from outcore.planner import cargo
from tests.memory.test_state import SGD, batch, network, offloaded, same, train
from tests.memory.test_state_loops import keeper

booked: list[tuple[int, int]] = []
"""Where in which memory the copies of a turn begin, in the order in which they were booked."""


class Noted:
    """A turn that notes when it is booked."""

    def __init__(self, turn: Turn, ends: Sequence[Ends]) -> None:
        self.turn, self.ends = turn, ends

    @property
    def left(self) -> Mark | None:
        return self.turn.left

    def book(self, after: Sequence[Mark] = ()) -> Mark:
        booked.append((self.ends[0][0].data_ptr(), len(after)))
        return self.turn.book(after)


class NotedLanes(ThreadLanes):
    def turn(self, ends: Sequence[Ends]) -> Noted:
        return Noted(super().turn(ends), ends)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is large, for networks of some kilobytes: lots of 2, 16 and 64 kB, of which the last two have halves."""
    for name, size in (("_LEAST_BYTES", 1024), ("_TURN_BYTES", 2048), ("_HALVED_BYTES", 4096)):
        monkeypatch.setattr(parcels, name, size)
    monkeypatch.setattr(cargo, "_FIRST_BYTES", 2560)
    monkeypatch.setattr(traffic, "lanes_for", lambda device: NotedLanes())
    booked.clear()
    yield


def running(steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = offloaded(model, SGD, update="backward", optimizer="keep")
    train(model, optimizer, steps)
    assert keeper(model).fast
    return model, optimizer


def starts(model: nn.Module) -> list[list[int]]:
    """Of every lot, where the parts of its turn begin."""
    return [[part.ends[0][0].data_ptr() for part in lot.weights.turns] for lot in keeper(model).lots]


def test_second_halves_follow_the_lot_that_is_needed_first() -> None:
    model, _ = running()
    parts = starts(model)
    assert [len(row) for row in parts] == [1, 2, 2]
    firsts = [parts[2][0], parts[1][0], parts[0][0]]
    seconds = [parts[1][1], parts[2][1]]
    assert [start for start, _ in booked[-5:]] == firsts + seconds
    assert [marks for _, marks in booked[-5:]] == [0, 0, 0, 1, 1]


def test_weights_are_those_of_plain_training() -> None:
    model, optimizer = running(6)
    plain = network()
    train(plain, SGD(plain.parameters()), 6)
    assert same(model, plain) and optimizer is not None


def test_all_of_a_lot_is_at_home_when_backward_ends_early() -> None:
    model, _ = running()

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    first = next(iter(model.parameters()))
    hook = first.register_hook(stop)  # the large lots were updated by then, and owe their second halves
    with pytest.raises(StopError):
        model(batch()).square().mean().backward()
    hook.remove()
    assert any(parcel.owed for parcel in keeper(model).parcels)
    here = {name: p.detach().clone() for name, p in model.named_parameters()}
    keeper(model).go_home()
    assert all(torch.equal(p, here[name]) for name, p in model.named_parameters())
    assert not any(parcel.owed or parcel.here for parcel in keeper(model).parcels)


def test_lots_without_a_last_one_are_completed_by_the_step() -> None:
    model, optimizer = running()
    last = next(iter(model.parameters()))
    optimizer.zero_grad()
    model[3:](torch.randn(4, 8, 12, 12)).square().mean().backward()  # the first lot has no gradient this time
    assert last.grad is None
    optimizer.step()
    assert not any(parcel.owed for parcel in keeper(model).parcels)
