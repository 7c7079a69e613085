"""Merged calls are replayed from a recording, and no recording is used after something it read has changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from outcore.memory.op_fusion import conv_bias_relu
from outcore.memory.saved_tensors.call_size import CallSize
from tests.graph.changing import CHANGES, Changing, batch, changing, reset, train_both
from tests.memory.fused import managed, replaced


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conv_bias_relu, "_DEVICES", {"cpu"})
    yield
    reset()


def step_of(net: Changing):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(images: torch.Tensor, targets: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        loss = F.mse_loss(net(images), targets)
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return step


@pytest.mark.parametrize("which", CHANGES)
def test_a_change_counts_from_the_next_step(which: str) -> None:
    net = changing()
    managed(net, batch(0)[0])
    assert replaced(net)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train_both(step_of(net), [net], CHANGES[which])
    sentences = [str(w.message) for w in told if "changes in every call" in str(w.message)]
    assert len(sentences) == (which == "counts")
    if which == "writes":
        assert net.aux.requires_grad


def test_what_changes_in_every_step_runs_live_and_is_named_once() -> None:
    net = changing()
    managed(net, batch(0)[0])
    with pytest.warns(UserWarning, match=r"self\.alpha of Changing changes in every call") as told:
        train_both(step_of(net), [net], lambda _: None, every=True)
    assert len(told) == 1
    managed_forward = net.__dict__["forward"]
    assert managed_forward.varying == "self.alpha of Changing" and not replaced(net)
    assert all(isinstance(key, CallSize) for key in managed_forward.admitted)


def test_a_model_with_hooks_of_its_own_runs_them_once() -> None:
    net = changing()
    net.register_forward_hook(lambda module, args, output: output * 2)
    managed(net, batch(0)[0])
    train_both(step_of(net), [net], lambda _: None, steps=3)
