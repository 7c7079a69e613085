"""A streamed model gives what the model gives, whatever changes between its steps, or says what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import outcore
from outcore.errors import OutcoreError, VaryingError
from tests.graph.changing import CHANGES, Changing, changing, reset, train_both

REFUSED = {
    "hook": "has hooks",
    "counts": r"self\.step of Changing changes in every call",
    "draws": "looks at numbers",
    "writes": r"forward writes self\.aux of Changing",
}


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    reset()


def step_of(net: Changing) -> Callable[[torch.Tensor, torch.Tensor], list[float]]:
    streamed = outcore.stream.stream(net, tile=8, boundary="second")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(images: torch.Tensor, targets: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        loss = F.mse_loss(streamed(images), targets)
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return step


@pytest.mark.parametrize("which", CHANGES)
def test_a_change_counts_from_the_next_step(which: str) -> None:
    net = changing()
    if which in REFUSED:
        with pytest.raises(OutcoreError, match=REFUSED[which]):
            train_both(step_of(net), [net], CHANGES[which])
        return
    train_both(step_of(net), [net], CHANGES[which])


def test_what_changes_in_every_step_is_refused_by_its_name() -> None:
    net = changing()
    with pytest.raises(VaryingError, match=r"self\.alpha of Changing changes in every call"):
        train_both(step_of(net), [net], lambda _: None, every=True)
