"""What of the state is on the device is predicted as it happens: every kind of network, counted beside."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.memory.offload.copy_streams import _Task
from outcore.planner.memory.buckets import (
    OffloadableParam,
    OffloadableParams,
    packed,
    rounded,
    that_follows,
    that_leave,
)
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.state_policy import StatePolicy, ladder
from tests.foreign.sample import one_in
from tests.memory.param_offload.test_offloader import ADAM, SGD


class Tied(nn.Module):
    """A language model whose first and last layer are one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(600, 48), nn.Parameter(torch.randn(24, 48))
        layers = [nn.TransformerEncoderLayer(48, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(48)
        self.head = nn.Linear(48, 600, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM, whose weights stay where they are, between layers whose weights do not."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(900, 48), nn.LSTM(48, 48, 2), nn.Linear(48, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(tokens))[0])


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))


def images() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(16 if i else 3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for i in range(6)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 900))


def frozen() -> nn.Module:
    model = deep()
    for p in list(model.parameters())[:8]:
        p.requires_grad_(False)
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "deep": (deep, lambda: torch.randn(8, 64)),
    "tied": (Tied, lambda: torch.randint(0, 600, (2, 24))),
    "recurrent": (Recurrent, lambda: torch.randint(0, 300, (12, 4))),
    "images": (images, lambda: torch.randn(2, 3, 20, 20)),
    "frozen": (frozen, lambda: torch.randn(8, 64)),
}


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies end when they are waited for, as on a link that is slow beside the computing."""
    finish = _Task.finish

    def finished(task: _Task) -> None:
        finish(task)
        task.known = True  # type: ignore[attr-defined]

    monkeypatch.setattr(_Task, "finish", finished)
    monkeypatch.setattr(_Task, "done", lambda task: task.task is None or getattr(task, "known", False))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def planned(model: nn.Module) -> MemoryPlan:
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


def measured(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """The most that a later step holds above the homes of state."""

    def step() -> None:
        optimizer.zero_grad()
        output = model(batch)  # which is held until the end, as in most loops
        loss_of(output).backward()
        optimizer.step()

    for _ in range(2):
        step()
    optimizer.zero_grad()
    keeper = model.__dict__["forward"].keeper
    homes = [flat_buffer.off_device for flat_buffer in keeper.flat_buffers] if keeper is not None else []
    if keeper is not None and keeper.gradients is not None:
        homes += [home.memory for home in keeper.gradients.storages.values()]
    if keeper is not None and keeper.state_copies is not None:
        homes += [flat_buffer.off_device for flat_buffer in keeper.state_copies.flat_buffers.values()]
    below = {home.untyped_storage().data_ptr() for home in homes}
    state = [t for s in optimizer.state.values() for t in s.values()]
    mine = [*model.parameters(), *model.buffers(), batch, *state]
    mine += [p.place.memory for p in keeper.flat_buffers if p.place is not None] if keeper is not None else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in mine}
    here = sum(s.nbytes() for at, s in storages.items() if at not in below)
    with LiveBytes([*homes, *mine]) as live:
        step()
    return here + live.peak


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize(("name", "make"), one_in(2, product(NETWORKS, [ADAM, SGD])))
def test_a_step_holds_what_is_predicted(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model, batch = NETWORKS[name][0](), NETWORKS[name][1]()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    costs = by_bytes(account(outcore.capture(model, (batch,))), 1e9)
    rungs = ladder(costs.parameters)
    by_hand = (
        StatePolicy("offload", "keep", "offload"),
        StatePolicy("offload", stage_bytes=60_000, flat_buffer_bytes=9000),
    )
    for policy in (*rungs, *by_hand):
        outcore.within(
            model, (batch,), memory=2**50, loss=loss_of, optimizer=optimizer, costs=costs, state=policy, quiet=True
        )
        predicted, found = planned(model).peak_bytes, measured(model, batch, optimizer)
        assert 0.95 * predicted <= found <= 1.005 * predicted, (policy, found / predicted)
        outcore.release(model)


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("name", NETWORKS)
def test_budgets_down_to_the_smallest_are_kept(name: str) -> None:
    torch.manual_seed(0)
    model, batch = NETWORKS[name][0](), NETWORKS[name][1]()
    optimizer = ADAM([p for p in model.parameters() if p.requires_grad])
    costs = by_bytes(account(outcore.capture(model, (batch,))), 1e9)

    def within(budget: int | None) -> None:
        outcore.within(
            model, (batch,), memory=budget, loss=loss_of, optimizer=optimizer, costs=costs, stream=False, quiet=True
        )

    within(None)
    plain = planned(model).plain_bytes
    with pytest.raises(PlanError, match="smallest budget") as refused:
        within(1000)
    least = refused.value.least_bytes
    assert least is not None and least < plain
    for budget in (plain, (plain + least) // 2, (plain + 3 * least) // 4, least):
        within(budget)
        found = measured(model, batch, optimizer)
        assert found <= 1.005 * budget and 0.95 * planned(model).peak_bytes <= found, budget / plain
        outcore.release(model)


def test_buckets_are_packed_in_order_and_large_ones_are_alone() -> None:
    sizes = [100, 5000, 700, 90_000, 12, 30, 4000, 4000, 4000]
    buckets = packed(sizes, 8000)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    taken = [sum(rounded(sizes[i]) for i in bucket) for bucket in buckets]
    assert all(size <= 9000 for bucket, size in zip(buckets, taken, strict=True) if 3 not in bucket)
    assert next(bucket for bucket in buckets if 3 in bucket)[0] == 3
    growing = packed([1000] * 40, 10**6, 4096)
    assert [len(bucket) for bucket in growing] == [4, 36]


def test_what_will_not_be_needed_for_longest_leaves() -> None:
    sizes = [10, 20, 30, 40]
    assert that_leave([0, 1, 2], sizes, 40, [2], 75, backward=False) == [0, 1]
    assert that_leave([0, 1, 2], sizes, 15, [0], 60, backward=True) == [2]
    assert that_leave([0, 1], sizes, 30, [], 60, backward=False) == []
    assert that_follows([1], sizes, 50, backward=False) == 2
    assert that_follows([1], sizes, 49, backward=False) is None
    assert that_follows([1, 2], sizes, 60, backward=True) == 0
    assert that_follows([0], sizes, 99, backward=True) is None


def test_frozen_parameters_travel_apart() -> None:
    items = tuple(OffloadableParam(f"p{i}", 512, trained=i % 2 == 0) for i in range(6))
    buckets = OffloadableParams(items, {}, {}).buckets(StatePolicy(optimizer="offload", flat_buffer_bytes=1024))
    assert [[item.name for item in bucket] for bucket in buckets] == [["p0", "p2"], ["p1", "p3"], ["p4"], ["p5"]]
