"""The time of copying state in an optimizer's step, against the link played through bucket by bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.planner.memory.buckets import OffloadableParam, OffloadableParams
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.state_policy import StatePolicy, further, ladder
from outcore.planner.memory.state_savings import _update_s

TIER = OffloadTarget(out_bytes_per_s=5e6, in_bytes_per_s=8e6)
SGD = OptimizerCost.of(1.0, "cpu")
SIZES = {"even": [4096] * 40, "one is most": [4096, 8192, 600_000, 4096], "growing": [4096 * i for i in range(1, 20)]}


def _played(ins: list[int], outs: list[int]) -> float:
    """One bucket after the other comes; each leaves when it is there and the one before has left."""
    come = left = 0.0
    for size_in, size_out in zip(ins, outs, strict=True):
        come += size_in / TIER.in_bytes_per_s
        left = max(left, come) + size_out / TIER.out_bytes_per_s
    return left


@pytest.mark.parametrize("name", SIZES)
def test_an_update_takes_as_long_as_its_copies(name: str) -> None:
    items = tuple(OffloadableParam(f"p{i}", size) for i, size in enumerate(SIZES[name]))
    params = OffloadableParams(items, {}, {})
    idle, optimizer, beside, window = ladder({item.name: item.bytes for item in items})
    for policy, read, written in ((optimizer, 1, 1), (beside, 2, 1), (window, 3, 2)):
        sizes = [sum(item.bytes for item in bucket) for bucket in params.buckets(policy)]
        if policy.stage_bytes is not None:
            sizes.reverse()
        want = _played([read * size for size in sizes], [written * size for size in sizes])
        assert _update_s(policy, params, SGD, TIER) == pytest.approx(want)
    assert _update_s(idle, params, SGD, TIER) == 0


def test_what_left_the_device_stays_below_it() -> None:
    idle, optimizer, beside, window = states = ladder({"weight": 2**20})
    assert further(states, idle) == states
    assert further(states, optimizer) == (optimizer, window)
    assert further(states, beside) == (beside, window)
    by_hand = replace(window, stage_bytes=5)
    assert further(states, by_hand) == (by_hand,)
    assert StatePolicy() == idle
