"""What of a budget is left for a compiled step's values; what a compiled plan says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from outcore.compiled.plan import CompiledPlan
from outcore.compiled.room import Room, library_bytes, refusal, room_of
from outcore.compiled.trial_step import distinct_bytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError

ROOMS = [
    Room(1000, 50),
    Room(1000, 50, copied_bytes=300, workspace_bytes=200),
    Room(1000, 50, copied_bytes=3, workspace_bytes=2, margin=0.02),
    Room(123_457, 0, workspace_bytes=9, margin=0.3),
]


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("peak", [0, 1, 777, 10**6 + 1])
@pytest.mark.parametrize("corrected", [0, 50])
def test_the_smallest_budget_leaves_room_and_a_little_less_does_not(room: Room, peak: int, corrected: int) -> None:
    least = room.least(peak, corrected)
    assert room.left(least, corrected) >= peak
    assert room.left(least - 3, corrected) < peak


def test_what_is_left_is_the_budget_without_the_rest() -> None:
    plain, copies, margin, _ = ROOMS
    assert plain.left(10_000, 0) == 9000 and plain.left(10_000, 70) == 8930
    assert copies.left(10_000, 0) == 8500
    assert margin.left(10_000, 0) == 8800, "the margin, where it is more than what libraries take"
    assert margin.left(100, 0) == 100 - 1000 - 5, "and otherwise those"


@pytest.mark.parametrize("graphs", [False, True])
def test_weights_arguments_and_optimizer_state_are_there_throughout(graphs: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    model[0].bias.requires_grad_(False)
    x = torch.zeros(7, 10)
    optimizer = OptimizerCost.of(torch.optim.Adam(p for p in model.parameters() if p.requires_grad))
    found = room_of(model, (x, x[:2]), {"mask": None}, optimizer, torch.device("cpu"), graphs=graphs)
    trained = 4 * (100 + 20)
    state = optimizer.state_bytes({"0.weight": 400, "1.weight": 40, "1.bias": 40})
    buffers = 4 * 20 + 8
    assert found.own_bytes == trained + 4 * 10 + buffers + 4 * 70 + state and state >= 2 * trained
    assert found.update_bytes >= trained and found.margin == 0.0
    assert found.copied_bytes == found.fixed_bytes == (4 * 70 + trained if graphs else 0)
    assert library_bytes(torch.device("cpu")) == 0


def test_memory_that_tensors_share_is_counted_once() -> None:
    x, other = torch.zeros(10, 10), torch.zeros(5)
    assert distinct_bytes([x, other, x]) == 420
    assert distinct_bytes([x[:4], x[2:6], x[3], x.t()[:, :6]]) == 240, "six of its rows, in four views"
    assert distinct_bytes([x[:2], x[8:]]) == 160 and distinct_bytes([]) == 0


def test_a_refusal_names_a_budget_that_would_do() -> None:
    refused = refusal(5 << 20, (7 << 20) + 1, "the smallest step")
    assert isinstance(refused, PlanError) and refused.least_bytes == (7 << 20) + 1
    assert "within 5.0 MiB: the smallest step needs 7.0 MiB" in str(refused) and 'memory="8MiB"' in str(refused)


PLAN = CompiledPlan(
    budget_bytes=None,
    peak_bytes=3 << 20,
    fastest_bytes=4 << 20,
    plain_bytes=6 << 20,
    least_bytes=2 << 20,
    measured_bytes=None,
    measured_s=None,
    corrected_bytes=0,
    seconds=0.3,
    fastest_s=0.2,
    pieces=1,
    saved_bytes=5 << 20,
    offloaded_bytes=0,
    again=17,
    compile_s=12.0,
)


def test_a_plan_tells_its_peak_its_time_and_what_is_made_again() -> None:
    text = PLAN.explain()
    assert PLAN.slowdown == pytest.approx(1.5) and replace(PLAN, fastest_s=0.0).slowdown == 1.0
    for words in ("peak 3.0 MiB predicted (torch.compile 4.0 MiB, plain 6.0 MiB)", "1.50x the time of torch.compile",
                  "compiled in 12 s as 1 piece", "5.0 MiB saved for the backward, 17 values made again"):  # fmt: skip
        assert words in text
    assert len(text.splitlines()) == 2 and "pieces" not in text
    assert "as 2 pieces" in replace(PLAN, pieces=2).explain() and PLAN.policy == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offloaded_bytes": 1 << 20}, "1.0 MiB of them leave the device until the backward"),
        ({"chunk_rows": 64}, "they run in chunks of 64 rows"),
        ({"host_s": 0.25}, "launching a step takes the host 250.0 ms"),
        ({"graphs": True}, "forward and backward are CUDA graphs"),
        ({"measured_bytes": 2 << 20}, "measured 2.0 MiB in a step before training"),
        ({"corrected_bytes": 3 << 10}, "3.0 KiB of the budget are left for what predictions miss"),
    ],
)
def test_what_a_plan_does_beside_is_one_line_more(change: dict[str, object], said: str) -> None:
    lines = replace(PLAN, **change).explain().splitlines()
    assert len(lines) == 3 and said in lines[-1]


def test_a_host_that_is_fast_enough_is_not_mentioned() -> None:
    assert "launching" not in replace(PLAN, host_s=0.23).explain()
