"""Planning for state: what leaves the device when nothing else meets the budget, or is slower; what a step holds."""

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.planner.memory.state_policy import StatePolicy, ladder
from outcore.program.plan.document import Plan
from tests.memory.param_offload.test_offloader import ADAM, OPTIMIZERS, same
from tests.memory.param_offload.test_offloader_loops import keeper

WIDTH = 96


def deep(layers: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def batch(i: int = 0) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


def rough(model: nn.Module) -> Costs:
    return by_bytes(account(outcore.capture(model, (batch(),))), 1e9)


def planned(model: nn.Module) -> MemoryPlan:
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.zero_grad()
    model(batch(i)).square().mean().backward()
    optimizer.step()


def peak(model: nn.Module, optimizer: torch.optim.Optimizer, known: list[torch.Tensor]) -> int:
    """The most that a later step holds beside what is announced."""
    for i in range(2):
        step(model, optimizer, i)
    with LiveBytes(known) as live:
        step(model, optimizer, 2)
        return live.peak


@pytest.mark.parametrize("share", [0.7, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_leaves_when_nothing_else_meets_the_budget(name: str, share: float) -> None:
    model, plain = deep(), deep()
    optimizer, twin = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    costs = rough(model)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, quiet=True)
    budget = int(share * planned(model).plain_bytes)
    assert planned(model).state.idle
    outcore.within(model, (batch(),), memory=budget, optimizer=optimizer, costs=costs, quiet=True)
    plan = planned(model)
    assert plan.state.optimizer == "offload"
    assert plan.state.parameters == ("offload" if share < 0.5 or name == "sgd" else "keep")
    assert plan.peak_bytes <= budget and "below the device" in plan.explain()
    for i in range(3):
        step(model, optimizer, i), step(plain, twin, i)
    assert same(model, plain)


@pytest.mark.parametrize(("rate", "leaves"), [(1e13, True), (2e8, False)])
def test_state_leaves_where_that_is_faster_than_to_make_values_again(rate: float, leaves: bool) -> None:
    graph = outcore.capture(deep(), (torch.randn(200, WIDTH),))
    costs = by_bytes(account(graph), 1e9)

    def planned_with(*states: StatePolicy) -> MemoryPlan:
        tier = OffloadTarget(rate, rate, least_bytes=2**40)  # values cannot leave
        return plan_memory(graph, costs, budget_bytes=budget, optimizer=2.0, tier=tier, states=states)

    budget = None
    rungs, plain = ladder(costs.parameters), planned_with(StatePolicy())
    budget = plain.peak_bytes - 3 * sum(costs.parameters.values()) // 4
    stays, found = planned_with(rungs[0]), planned_with(*rungs)
    assert stays.slowdown > 1.05 and stays.peak_bytes <= budget
    assert found.state.idle is not leaves and found.peak_bytes <= budget
    assert found.slowdown < stays.slowdown or not leaves
    again = found.keeping.evaluate(found.assignment.policy)
    assert again.peak_bytes == found.outcome.peak_bytes  # state is where the plan says, not where it was tried last


def test_measured_bytes_are_at_most_what_was_predicted() -> None:
    for policy in ladder({f"p{i}": 4 * WIDTH * WIDTH for i in range(16)}):
        model = deep()
        optimizer = ADAM(model.parameters())
        costs = rough(model)
        outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, state=policy, quiet=True)
        plan = planned(model)
        fixed = [*model.parameters(), *model.buffers()] if policy.parameters == "keep" else []
        homes = [] if policy.idle else [p.off_device for p in keeper(model).flat_buffers]
        if not policy.idle and (gradients := keeper(model).gradients) is not None:
            homes += [home.memory for home in gradients.storages.values()]
        for i in range(2):
            step(model, optimizer, i)
        state_copies = None if policy.idle else keeper(model).state_copies
        homes += [p.off_device for p in state_copies.flat_buffers.values()] if state_copies is not None else []
        state = [t for s in optimizer.state.values() for t in s.values() if policy.optimizer == "keep"]
        optimizer.zero_grad()
        with LiveBytes([*fixed, *homes, *state]) as live:
            step(model, optimizer, 2)
        measured = live.peak + sum(t.untyped_storage().nbytes() for t in [*fixed, *state])
        assert measured <= plan.peak_bytes, policy
        assert measured >= 0.6 * plan.peak_bytes, policy


def test_a_plan_keeps_where_state_lives() -> None:
    model = deep(4)
    optimizer = ADAM(model.parameters())
    state = {"optimizer": "offload", "flat_buffer_bytes": 4096}
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=rough(model), state=state, quiet=True)
    document = Plan.from_json(planned(model).document().to_json())
    assert StatePolicy.of(document.state) == StatePolicy.of(state)
    outcore.release(model)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=rough(model), plan=document, quiet=True)
    assert planned(model).state == StatePolicy.of(state)
    assert keeper(model).state_copies is not None


def test_without_the_optimizer_itself_state_stays_and_too_small_a_budget_is_refused() -> None:
    model = deep()
    costs = rough(model)
    outcore.within(model, (batch(),), memory=None, optimizer=torch.optim.Adam, costs=costs, quiet=True)
    budget = int(0.5 * planned(model).plain_bytes)
    with pytest.raises(PlanError, match="smallest budget"):
        outcore.within(
            model, (batch(),), memory=budget, optimizer=torch.optim.Adam, costs=costs, stream=False, quiet=True
        )
