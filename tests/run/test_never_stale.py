"""An engine on one rank trains as plain PyTorch does, whatever changes between its steps, or says what it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import OutcoreError, VaryingError
from tests.graph.changing import CHANGES, Changing, batch, changing, reset, train_both

REFUSED = {
    "buffer": r"self\.gain of Changing is another tensor than before",
    "counts": r"self\.step of Changing changes in every call",
    "draws": "generator",
    "writes": r"forward writes self\.aux of Changing",
}


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    reset()


def engine_of(net: nn.Module) -> outcore.Engine:
    def optimizer(params):
        return torch.optim.SGD(params, 0.01)

    return outcore.Engine(net, loss=F.mse_loss, optimizer=optimizer, example=batch(0)[0], device="cpu")


@pytest.mark.parametrize("which", CHANGES)
def test_a_change_counts_from_the_next_step(which: str) -> None:
    net = changing()
    with engine_of(net) as engine:
        if which in REFUSED:
            with pytest.raises(OutcoreError, match=REFUSED[which]):
                train_both(lambda x, y: [engine.step(x, y)], [net], CHANGES[which])
            return
        train_both(lambda x, y: [engine.step(x, y)], [net], CHANGES[which])


def test_what_changes_in_every_step_is_refused_by_its_name() -> None:
    net = changing()
    with engine_of(net) as engine, pytest.raises(VaryingError, match=r"self\.alpha of Changing changes in every call"):
        train_both(lambda x, y: [engine.step(x, y)], [net], lambda _: None, every=True)


def test_another_way_through_the_data_is_refused() -> None:
    class Branching(Changing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2 if x.mean() > 0 else x)

    torch.manual_seed(0)
    images, targets = batch(0)
    with engine_of(Branching().double()) as engine:
        engine.step(images.abs() if images.mean() > 0 else -images.abs(), targets)
        with pytest.raises(VaryingError, match="another way"):
            engine.step(-images.abs() if images.mean() > 0 else images.abs(), targets)
