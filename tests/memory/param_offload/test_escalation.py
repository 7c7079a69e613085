"""State moves further down while a model trains, and the training stays plain training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.saved_tensors import managed_forward as managed_forwards
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.state_policy import StatePolicy
from tests.memory.param_offload.test_offloader import ADAM, same
from tests.memory.param_offload.test_offloader_plan import WIDTH, batch, deep
from tests.memory.saved_tensors.test_peak_monitor import Counter

LOOPS = ["zero before", "zero between", "two forwards", "adding up"]


def planned(model: nn.Module) -> MemoryPlan:
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int, loop: str, device: str = "cpu") -> None:
    """A step of one of the loops that people write."""
    if loop in ("zero before", "two forwards"):
        optimizer.zero_grad()
    loss = model(batch(i).to(device)).square().mean()
    if loop == "zero between":
        optimizer.zero_grad()
    if loop == "two forwards":
        loss = loss + model(batch(100 + i).to(device)).sum()
    loss.backward()
    if loop == "adding up" and i % 2 == 0:
        return
    optimizer.step()
    if loop == "adding up":
        optimizer.zero_grad()


def watched(
    monkeypatch: pytest.MonkeyPatch, share: float, above: int, device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, Counter]:
    """A model within a share of plain training's peak whose steps take some bytes more than predicted."""
    model, x = deep().to(device), batch().to(device)
    optimizer = ADAM(model.parameters())
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(model, (x,), memory=None, optimizer=optimizer, costs=costs, quiet=True)
    budget = int(share * planned(model).plain_bytes)
    counter = Counter(budget + above)
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (x,), memory=budget, optimizer=optimizer, costs=costs, quiet=True)
    return model, optimizer, counter


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("share", "above", "first", "last"),
    [
        (1.05, 4 * WIDTH * WIDTH * 8, "no state", "the optimizer's state"),
        (1.05, 4 * WIDTH * WIDTH * 40, "no state", "parameters, gradients"),
        (0.7, 4 * WIDTH * WIDTH * 16, "the optimizer's state", "parameters, gradients"),
    ],
)
def test_steps_above_the_budget_send_state_further_down(
    monkeypatch: pytest.MonkeyPatch, share: float, above: int, first: str, last: str, loop: str
) -> None:
    model, optimizer, counter = watched(monkeypatch, share, above)
    plain = deep()
    twin = ADAM(plain.parameters())
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    budget = managed_forward.settings.budget_bytes
    assert budget is not None and str(planned(model).state).startswith(first)
    for i in range(10):
        step(model, optimizer, i, loop), step(plain, twin, i, loop)
        if not str(planned(model).state).startswith(first):
            counter.most = budget  # the correction has worked
        assert same(model, plain), i
    plan = planned(model)
    assert str(plan.state).startswith(last)
    assert managed_forward.keeper is not None and managed_forward.keeper.policy == plan.state
    assert plan.peak_bytes <= budget
    moments = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
    assert moments and all(t.untyped_storage().nbytes() > t.nbytes for t in moments)  # they are in their homes
    outcore.release(model)
    for i in range(10, 12):
        step(model, optimizer, i, "zero before"), step(plain, twin, i, "zero before")
    assert same(model, plain)


def test_a_larger_batch_may_send_state_further_down() -> None:
    model, plain = deep(), deep()
    optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e9)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, quiet=True)
    budget = int(1.02 * planned(model).plain_bytes)
    outcore.within(model, (batch(),), memory=budget, optimizer=optimizer, costs=costs, quiet=True)
    assert planned(model).state.idle
    large = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(5))
    for i in range(6):
        for each, its in ((model, optimizer), (plain, twin)):
            its.zero_grad()
            each(large if i % 2 else batch(i)).square().mean().backward()
            its.step()
        assert same(model, plain), i
    keeper = model.__dict__["forward"].keeper
    assert keeper is not None and keeper.policy != StatePolicy()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:outcore. a step reserves")  # a segment is larger than this network
@pytest.mark.parametrize("loop", LOOPS)
def test_on_a_gpu_state_moves_further_down_too(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    model, optimizer, counter = watched(monkeypatch, 1.05, 4 * WIDTH * WIDTH * 8, "cuda")
    plain = deep().to("cuda")
    twin = ADAM(plain.parameters())
    managed_forward = model.__dict__["forward"]
    seen = []
    for i in range(16):
        step(model, optimizer, i, loop, "cuda"), step(plain, twin, i, loop, "cuda")
        if str(planned(model).state) not in seen:
            seen.append(str(planned(model).state))
            counter.most += 4 * WIDTH * WIDTH * 16 if len(seen) == 2 else 0
        if len(seen) == 3:
            counter.most = 0
        theirs = plain.state_dict()
        assert all(torch.equal(p.cuda(), theirs[name]) for name, p in model.state_dict().items()), i
    assert [text.split(",")[0].split(" below")[0] for text in seen] == [
        "no state",
        "the optimizer's state",
        "parameters",
    ]
    assert managed_forward.keeper.policy == planned(model).state
