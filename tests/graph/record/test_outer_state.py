"""What a forward keeps outside of the model is after recording and planning what it was before."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.profile import profile
from outcore.machine import remembered
from tests.foreign.sample import one_in
from tests.graph.caches import CASES, CHANGING, load


def recorded(model: nn.Module, x: torch.Tensor) -> None:
    outcore.capture(model, (x,))


def planned(model: nn.Module, x: torch.Tensor) -> None:
    outcore.within(model, (x,), memory="100%", quiet=True)


def planned_for_less(model: nn.Module, x: torch.Tensor) -> None:
    outcore.within(model, (x,), memory="85%", quiet=True)


def job(model: nn.Module) -> outcore.Job:
    return outcore.Job(
        model=type(model),
        batch=lambda n: (torch.randn(n, 24), torch.randn(n, 24)),
        loss=nn.functional.mse_loss,
        size=512,
    )


def profiled(model: nn.Module, x: torch.Tensor) -> None:
    profile(job(model), remembered().devices[0])


def measured(model: nn.Module, x: torch.Tensor) -> None:
    profile(job(model), remembered().devices[0], measured=True, time_limit_s=0.2)


def planned_for_ranks(model: nn.Module, x: torch.Tensor) -> None:
    outcore.plan(outcore.capture(model, (x,)), devices=2)


LOOKS: list[Callable[[nn.Module, torch.Tensor], None]] = [
    recorded,
    planned,
    planned_for_less,
    profiled,
    measured,
    planned_for_ranks,
]


@pytest.mark.parametrize(("name", "look"), one_in(6, itertools.product(CASES, LOOKS)))
def test_forward_is_what_it_was(name: str, look: Callable[[Any, Any], None]) -> None:
    x, (plain, model) = torch.randn(512, 24), (load(name), load(name))
    expected, net = plain.Net(), model.Net()
    net.load_state_dict(expected.state_dict())
    look(net, x)
    for _ in range(2):
        found, wanted = net(x), expected(x)
        assert type(found) is torch.Tensor and torch.equal(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
    for a, b in zip(net.parameters(), expected.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", CASES)
def test_a_recording_makes_again_what_is_only_kept(name: str) -> None:
    x, (plain, model) = torch.randn(64, 24), (load(name), load(name))
    expected, net = plain.Net(), model.Net()
    net.load_state_dict(expected.state_dict())
    graph = outcore.capture(net, (x,))
    for _ in range(3):
        assert torch.equal(graph.module(x), expected(x))
    assert torch.equal(net(x), expected(x)) and torch.equal(graph.module(x), expected(x))


@pytest.mark.parametrize("name", CHANGING)
def test_a_recording_is_refused_where_a_second_call_is_another(name: str) -> None:
    (plain, model), refused = (load(name), load(name)), 0
    expected, net = plain.Net(), model.Net()
    net.load_state_dict(expected.state_dict())
    module = outcore.capture(net, (torch.randn(64, 24),)).module
    for number in range(4):
        x = torch.randn(64, 24)
        torch.manual_seed(number)
        wanted = expected(x)
        torch.manual_seed(number)
        try:
            assert torch.equal(module(x), wanted)
        except outcore.errors.VaryingError:
            refused += 1
            torch.manual_seed(number)
            assert torch.equal(net(x), wanted)
        with torch.no_grad():
            for one in (net, expected):
                one.layers[0].bias.add_(1)
    assert refused


EINOPS = """
import torch, outcore
from einops import rearrange

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(rearrange(x, "b (h c) -> b h c", c=8))

net, x = Net(8, 8), torch.randn(4, 16)
module = outcore.capture(net, (x,)).module
assert torch.equal(module(x), net(x)) and torch.equal(module(x), net(x))
"""


def test_what_a_library_sets_up_in_the_first_call_is_no_part_of_the_model() -> None:
    done = subprocess.run([sys.executable, "-c", EINOPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
