"""A call that runs again in backward computes with what there was in forward."""

from __future__ import annotations

import copy

import torch
from torch import nn

import outcore


def test_running_statistics_that_another_call_moves_in_between() -> None:
    """A norm that uses its running statistics; torch writes them in the other call without counting it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 3)).double()
    model[1].eval()
    twin, x = copy.deepcopy(model), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    plan = {"1#0:out": "recompute", "2#0:out": "recompute"}
    outcore.within(model, (x,), memory=None, plan=plan, measure_s=0.05, quiet=True)
    for net in (model, twin):
        loss = net(x).square().sum()
        net[1].train()
        net[1](torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        net[1].eval()
        loss.backward()
    assert torch.equal(model[1].running_mean, twin[1].running_mean) and bool(twin[1].running_mean.any())
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
