"""The cache state before a timed run: what is touched, and how much of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.cache_state import CacheState, bytes_touched
from outcore.cost.measured.saved_bytes import account

CPU = torch.device("cpu")
MIB = 2**20


def test_arranging_the_caches_changes_no_value() -> None:
    tensors = [torch.randn(100), torch.randn(4, 5).t(), torch.arange(7)]
    before = [t.clone() for t in tensors]
    arrange = CacheState(CPU).before(tensors)
    arrange()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


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
