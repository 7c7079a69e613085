"""The cache state before a timed run: what is touched, and how much of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.cache_state import CacheState, bytes_touched
from outcore.cost.measured.saved_bytes import account

CPU = torch.device("cpu")
MIB = 2**20


def test_arranging_the_caches_moves_small_tensors_along_and_changes_no_other() -> None:
    small, weight = torch.randn(4, 25), torch.randn(100, requires_grad=True)
    same = [torch.randn(4, 5).t(), torch.arange(7), torch.randn(2**17), torch.randn(3).expand(2, 3)]
    before, numbers, version = [t.clone() for t in same], small.flatten().sort().values, weight._version
    arrange = CacheState(CPU).before([small, weight, *same])
    first = small.clone()
    arrange()
    assert not torch.equal(small, first) and torch.equal(small.flatten().sort().values, numbers)
    assert all(torch.equal(a, b) for a, b in zip(same, before, strict=True))
    assert weight._version == version  # what autograd has saved may still be used


@pytest.mark.parametrize(
    ("touched", "seconds", "expected"),
    [
        (3 * MIB, 1.0, 3 * MIB),
        (2**40, 1.0, 64 * MIB),  # no more than a cache holds
        (2**40, 1e-3, 8_000_000),  # nor than there is time for
        (0, 1.0, 0),
    ],
)
def test_so_many_other_bytes_are_touched_as_a_step_touches(touched: int, seconds: float, expected: int) -> None:
    state = CacheState(CPU)
    state.before([])()  # makes room for a whole cache
    arrange = state.before([], touched, seconds)
    before = state._elsewhere.clone()
    arrange()
    assert int((state._elsewhere != before).sum()) == expected
    state.release()
    assert state._elsewhere.numel() == 0


def test_calls_wait_for_what_comes_after_them() -> None:
    """Weights wait for a whole step; what a call saved waits for the calls after it, forward and backward."""
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    graph = outcore.capture(net, [(3, 4)])
    costs = account(graph, CPU)
    weights, values = (4 * 8 * 4, 8 * 2 * 4), (3 * 8 * 4, 3 * 8 * 4, 3 * 2 * 4)
    last = values[2] + 2 * weights[1]
    expected = {"0#0": last + values[1] + values[0] + 2 * weights[0], "1#0": last + values[1], "2#0": last}
    found = bytes_touched(graph, costs)
    assert {name: touched.backward for name, touched in found.items()} == expected
    assert {touched.forward for touched in found.values()} == {expected["0#0"]}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_caches_are_arranged_in_whatever_mode_a_call_runs(mode: Callable[[], AbstractContextManager[object]]) -> None:
    arrange = CacheState(CPU).before([torch.randn(8), torch.randn(3, 3).to_sparse(), torch.empty(0)], MIB)
    with mode():
        arrange()
        assert torch.is_inference_mode_enabled() is (mode is torch.inference_mode)
