"""The first steps are watched, and correct the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.saved_tensors import managed_forward as managed_forwards
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.peak_monitor import PeakMonitor


class Counter:
    """An allocator whose peak is what a test says."""

    def __init__(self, peak: int, others: int = 0) -> None:
        self.most, self.now, self.resets, self.looked_twice = peak, others, 0, 7

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset(self) -> None:
        self.resets += 1

    def retries(self) -> int:
        return self.looked_twice

    def wait(self) -> None:
        pass


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(2048, 32)


def steps(model: nn.Module, images: torch.Tensor, count: int) -> None:
    for _ in range(count):
        model(images).sum().backward()
        model.zero_grad()


def governed(monkeypatch: pytest.MonkeyPatch, share: float, over: float) -> tuple[ManagedForward, int, Counter]:
    """A model within a share of its plain peak that takes `over` times its budget."""
    model, images = network()
    outcore.within(model, (images,), memory=None, quiet=True)
    budget = int(share * outcore.memory_plan(model).plain_bytes)
    counter = Counter(int(over * budget))
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (images,), memory=budget, quiet=True)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    before = managed_forward.plan.peak_bytes
    steps(model, images, 3)
    assert managed_forward.plan.peak_bytes == before  # not before all of them were seen
    counter.most = min(counter.most, budget) if over > 1 and counter.resets == 0 else counter.most
    steps(model, images, 1)
    return managed_forward, before, counter


def test_a_step_within_its_budget_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    managed_forward, before, counter = governed(monkeypatch, 0.7, 0.9)
    (entry,) = managed_forward.admitted.values()
    assert entry is not None and entry.observer is None and entry.measured is not None
    assert entry.measured.peak_bytes == counter.most and entry.measured.step_s > 0
    assert "predicted" in entry.measured.beside(entry.plan)
    assert managed_forward.plan.peak_bytes == before and counter.resets == 3


def test_an_allocator_that_looks_twice_for_room_has_more_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network()
    outcore.within(model, (images,), memory=None, quiet=True)
    budget = int(0.7 * outcore.memory_plan(model).plain_bytes)
    counter = Counter(0)
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (images,), memory=budget, quiet=True)
    managed_forward = model.__dict__["forward"]
    before, peak = managed_forward.settings.reserved_bytes, managed_forward.plan.outcome.peak_bytes
    steps(model, images, 1)
    counter.looked_twice += 2
    steps(model, images, 3)
    left = before + int(0.03 * budget)
    assert managed_forward.settings.reserved_bytes == left and managed_forward.plan.outcome.peak_bytes < peak
    steps(model, images, 5)  # in which it finds room
    assert managed_forward.settings.reserved_bytes == left


def test_a_step_above_its_budget_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    managed_forward, before, counter = governed(monkeypatch, 0.7, 1.1)
    budget = managed_forward.settings.budget_bytes
    assert budget is not None
    missed = counter.most - before
    assert managed_forward.plan.outcome.peak_bytes + missed <= budget
    assert managed_forward.settings.reserved_bytes >= missed


def test_where_the_budget_cannot_be_kept_that_is_said_and_the_smallest_plan_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UserWarning, match="above its prediction"):
        managed_forward, before, counter = governed(monkeypatch, 0.9, 20.0)
    assert managed_forward.plan.outcome.peak_bytes < before
    assert managed_forward.plan.peak_bytes <= counter.most


def test_memory_of_others_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network()
    counter = Counter(10**9 + 5000, others=10**9)
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (images,), memory=None, quiet=True, plan={"1#0:out": "recompute"})
    steps(model, images, 4)
    (entry,) = model.__dict__["forward"].admitted.values()
    own = sum(p.nbytes for p in model.parameters()) * 3 + images.nbytes  # with Adam's state
    assert entry.measured is not None and entry.measured.peak_bytes == 5000 + own


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, count: int) -> None:
    for _ in range(count):
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("parameters", ["keep", "offload"])
def test_of_state_below_the_device_only_what_is_here_counts(monkeypatch: pytest.MonkeyPatch, parameters: str) -> None:
    model, images = network()
    weights = sum(p.nbytes for p in model.parameters())
    counter = Counter(0)
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"optimizer": "offload", "parameters": parameters}
    outcore.within(
        model, (images,), memory=None, plan={"1#0:out": "recompute"}, optimizer=optimizer, state=state, quiet=True
    )
    stage = weights if parameters == "keep" else sum(p.bytes for p in model.__dict__["forward"].keeper.flat_buffers)
    counter.now = 10**9 + stage + images.nbytes + 10 * len(list(model.parameters())) * 4  # and Adam's counters of steps
    counter.most = counter.now + 5000
    train(model, optimizer, images, 4)
    (entry,) = model.__dict__["forward"].admitted.values()
    assert entry.measured is not None
    assert 0 <= entry.measured.peak_bytes - (5000 + stage + images.nbytes) <= 10_000


def test_a_plan_with_state_below_the_device_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network()
    optimizer = torch.optim.Adam(model.parameters())
    outcore.within(model, (images,), memory=None, optimizer=optimizer, state={"optimizer": "offload"}, quiet=True)
    budget = int(0.7 * outcore.memory_plan(model).peak_bytes)
    counter = Counter(int(1.1 * budget))
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (images,), memory=budget, optimizer=optimizer, state={"optimizer": "offload"}, quiet=True)
    before = outcore.memory_plan(model).outcome.peak_bytes
    train(model, optimizer, images, 4)
    plan = outcore.memory_plan(model)
    assert plan.outcome.peak_bytes < before and plan.state.optimizer == "offload"
    assert model.__dict__["forward"].settings.reserved_bytes >= counter.most - before


def test_a_step_that_needs_nothing_is_watched_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = network()
    outcore.within(model, (images,), memory=None, quiet=True)
    budget = int(1.05 * outcore.memory_plan(model).plain_bytes)
    counter = Counter(int(1.1 * budget))
    monkeypatch.setattr(managed_forwards, "meter_for", lambda _: counter)
    outcore.within(model, (images,), memory=budget, quiet=True)
    assert not outcore.memory_plan(model).policy
    steps(model, images, 4)
    assert outcore.memory_plan(model).policy and counter.resets > 3


def test_what_libraries_keep_is_no_memory_of_others() -> None:
    model, images = network()
    counter = Counter(10_000_000, others=1_000_000 + sum(p.nbytes for p in model.parameters()) + images.nbytes)
    observer = PeakMonitor(model, 0, library_bytes=700_000, meter=counter)
    observer.look([images])
    assert observer.others == 300_000
