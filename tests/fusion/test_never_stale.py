"""A fused array trains as its models would alone, whatever changes between its steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import outcore
from tests.graph.changing import CHANGES, Changing, changing, reset, train_both


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    reset()


def fused(nets: list[Changing]) -> outcore.fusion.FusedArray:
    return outcore.fuse(nets, loss=F.mse_loss, optimizer=lambda params, i: torch.optim.SGD(params, 0.01))


@pytest.mark.filterwarnings("ignore:outcore")
@pytest.mark.parametrize("which", CHANGES)
def test_a_change_counts_from_the_next_step(which: str) -> None:
    nets = [changing(i) for i in range(2)]
    array = fused(nets)
    train_both(lambda x, y: array.step(x, y).tolist(), nets, CHANGES[which])
    if which == "writes":
        assert nets[1].aux.isfinite() and "writes self.aux" in array.notes[0]


@pytest.mark.parametrize("which", ["attribute", "inside an attribute", "dropout", "buffer", "hook"])
def test_a_change_of_one_member_is_its_own(which: str) -> None:
    nets = [changing(i) for i in range(3)]
    array = fused(nets)
    changed: list[Changing] = []

    def change(net: Changing) -> None:
        changed.append(net)
        if len(changed) in (2, 5):  # the second member, and its copy
            CHANGES[which](net)

    train_both(lambda x, y: array.step(x, y).tolist(), nets, change)


def test_what_changes_in_every_step_is_named_and_members_run_alone() -> None:
    nets = [changing(i) for i in range(2)]
    array = fused(nets)
    with pytest.warns(UserWarning, match=r"self\.alpha of Changing \(model\) changes in every call"):
        train_both(lambda x, y: array.step(x, y).tolist(), nets, lambda _: None, every=True)
    assert array.way.width == 1
