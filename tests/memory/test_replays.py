"""A replayed forward is as careful as plain training: what was overwritten is refused, what was begun is taken back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.offload.backends import DiskBackend
from outcore.memory.op_fusion import select
from outcore.memory.replay.compile_policies import prepare
from outcore.memory.replay.replay_forward import ReplayPass
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit
from outcore.program.policies import parse_policies
from tests.memory.fused import managed, replaced


class Spoils(nn.Module):
    """Writes over what the backward of tanh needs; plain training refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh()
        y.add_(1.0)
        return y.sum()


@pytest.mark.parametrize("policy", ["keep", "offload", "encode:sparse"])
def test_what_was_overwritten_after_it_was_saved_is_refused_under_every_policy(policy: str) -> None:
    model, x = Spoils(), torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).backward()
    graph = outcore.capture(model, (x,))
    assert graph.executable is not None
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, OffloadTarget(1e9, 1e9, least_bytes=1))
    chosen = {"tanh()#0:out": policy} if policy != "keep" else {}
    compiled = prepare(graph, graph.executable[1], model, keeping.buffers, emit(keeping, parse_policies(chosen)))
    tier = DiskBackend(max(compiled.offloaded_bytes, 1))
    loss = ReplayPass(compiled, model, [x], tier).forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    tier.close()


class Branches(nn.Module):
    """Goes one of two ways by its data, after its norm has followed the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).relu_()
        return self.last(y) if x.sum() > 0 else -self.last(y)


def test_a_replay_that_turns_out_to_go_another_way_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of the norm follow each batch once, whichever way it goes."""
    monkeypatch.setattr(select, "worth_it", lambda *_, **__: True)
    model = Branches()
    plain = copy.deepcopy(model)
    images = torch.rand(2, 3, 16, 16)
    managed(model, images)
    assert replaced(model), "nothing is replayed here"
    for sign in (1.0, -1.0, -1.0, 1.0):
        outs = [m(sign * images) for m in (model, plain)]
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
        for out in outs:
            out.square().sum().backward()
        for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-3)
