"""What a plan says of copies is what the table says at each call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.memory.saved_tensors.policy_table import compile_policies
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit
from outcore.program.policies import OFFLOAD, Policy


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


@pytest.mark.parametrize("rate", [2e8, 1e9, 1e11])
def test_copies_are_waited_for_and_begun_where_they_are_planned(rate: float) -> None:
    model = chain()
    graph = outcore.capture(model, (torch.randn(64, 64),))
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, OffloadTarget(rate, rate, least_bytes=1))
    policy: dict[str, Policy] = {f"{i}.1#0:out": OFFLOAD for i in range(7)}
    transfers = keeping.evaluate(policy).transfers
    assert transfers is not None and len(transfers.moved) == 7
    table = compile_policies(graph, model, keeping.buffers, emit(keeping, policy))
    order = list(graph.calls)
    leaving = {name: call for call, plan in table.calls.items() for name in plan.leaving}
    early = {name: call for call, plan in table.calls.items() for name in plan.released}
    late = {name: order[place] for place, names in table.released_late.items() for name in names}
    fetched = {name: order[place] for place, names in table.fetched.items() for name in names}
    for t in transfers.moved:
        assert leaving[t.buffer] == order[t.evict] and fetched[t.buffer] == order[t.fetch]
        assert (early if t.wait[0] == "forward" else late)[t.buffer] == order[t.wait[1]]
    assert not early.keys() & late.keys() and early.keys() | late.keys() == fetched.keys() == policy.keys()
    stopping = {call for call, plan in table.calls.items() if plan.stops}
    assert stopping == {*late.values(), *fetched.values()}
    assert {call for call, plan in table.calls.items() if plan.saves} >= {f"{i}.1#0" for i in range(7)}
    assert table.offloaded_bytes >= 7 * 64 * 64 * 4 and table.length == 16


def test_a_plan_of_nothing_does_nothing_and_one_of_unknown_memory_is_refused() -> None:
    model = chain()
    graph = outcore.capture(model, (torch.randn(4, 64),))
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, OffloadTarget(1e9, 1e9))
    assert compile_policies(graph, model, keeping.buffers, emit(keeping, {})).idle
    other = {n: b for n, b in keeping.buffers.items() if n != "3.1#0:out"}
    with pytest.raises(PlanError, match=r"the plan names 3\.1#0:out, which is no memory of Sequential"):
        compile_policies(graph, model, other, emit(keeping, {"3.1#0:out": OFFLOAD}))
